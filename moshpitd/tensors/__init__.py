"""All arithmetic on tensors: bucket layout, codecs, reduction. One rule: no import happens here.

`import torch` costs seconds, so a module of another room names the file it needs
(`moshpitd.tensors.layout`) instead of paying for the whole room. Nothing in this room sets one of
torch's global switches (threads, flush-to-zero, default dtype): they belong to the process.
"""
