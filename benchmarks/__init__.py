"""Benchmarks of the store's speed, size and use of resources, side by side with its peers.

``python -m benchmarks`` runs all parts, ``python -m benchmarks save load`` some; ``--help`` lists them. A part is a
module here with a function ``run``; `harness` measures and reports, `contenders` are measured, and `data` has the
models to save and load.
"""
