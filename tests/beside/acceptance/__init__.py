"""A small project, a package of its own, that uses the installed wheel: `python -m acceptance`, see `tools/matrix.py`.

It is copied out of the checkout before it runs, so that it finds only what is installed.
"""
