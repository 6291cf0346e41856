"""The arithmetic of the training algorithms, one file per family. One rule: pure functions.

Nothing here knows a clock, a network or a random generator: neighbours' tensors, compressors and
coins are arguments, so the daemon's clients, the simulator and the worked examples compute the same
bits. Functions return new tensors and new states and leave their arguments as they were. All
tensors of one call have one shape, one floating dtype and one device unless a docstring says
otherwise; bookkeeping (weights, versions, scales of steps) is in Python numbers.
"""
