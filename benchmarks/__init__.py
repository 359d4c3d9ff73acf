"""Benchmarks. `make bench` measures the library and its rivals side by side (`__main__`).

contestants   servers, and the processes of each contestant
client        the process in which a contestant makes its calls; `rivals` has one adapter for each
shop          the Django project of every contestant
works         what is measured
harness       rounds over the contestants in turn, noise of the machine
profiles      where the time of each work goes, by module; `floor`: the same statements without the library
targets       the targets, whether a run reaches them, and if not, why
report        docs/benchmarks.md, its plots, and results.json

`fairness`, `recovery`, `startup` and `pages` measure the library alone, each with a command of its own (`ground`).
"""
