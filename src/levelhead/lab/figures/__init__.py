"""The figures of the page, one file each: a setting in, a `Figure` out."""
