"""The processes that `moshpitd bench` measures with. One rule: each is told what to do line by line
on stdin, and ends when stdin ends, so that none outlives the bench.

They live here because the command itself may not import torch: it starts processes, as a person
would, and reads what they tell.
"""
