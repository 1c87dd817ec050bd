"""The local page: figures of the lab, drawn in a browser on this machine.

Python computes, the browser draws. The server listens on 127.0.0.1 only and requires its token. Needs the packages of
`levelhead[page]`.
"""
