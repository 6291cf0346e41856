"""The protocol as pure state machines and formulas. One rule: standard library only, and no clock,
socket, thread or global random number in here, so that the very code that runs on nodes is the code
that is simulated."""
