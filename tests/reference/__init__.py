"""The codecs and cuts of the compiled core once more, in numpy and Python: the oracle of its tests.

Each module here makes the decisions of the core and the payloads of the same format, one chunk at a time and slowly.
"""
