"""The course: chapters with their numbers, the words of the page in every language, code to run oneself.

No drawing and no server: the page shows what is made here. Every number of a chapter is computed or read from a record.
"""
