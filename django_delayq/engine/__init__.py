"""The delay queue on Redis. It holds only ids and due times, and imports no Django.

`records` alone does not load redis-py: it is all that a process needs which only describes changes.
"""
