"""One server for all tests of a process that read the page: it keeps nothing between requests."""

from browsing import served_address as served_address
