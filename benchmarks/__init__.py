"""Programs that measure: how fast, how small and how frugal the store is, side by side with its peers.

``python -m benchmarks`` runs all parts, ``python -m benchmarks save load`` some; ``--help`` lists them. A part is a
module here with a function ``run``; `harness` measures and reports, `contenders` are what is measured, `data` is what
they save and load.
"""
