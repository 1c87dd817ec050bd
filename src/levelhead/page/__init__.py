"""The local page: figures of the lab, drawn in a browser on this machine.

Python computes, the browser draws. The server answers 127.0.0.1 alone, and only who has its token;
its rules are in `guard` and `protocol`. Needs the packages of `levelhead[page]`.
"""
