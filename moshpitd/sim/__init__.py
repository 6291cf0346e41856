"""The deterministic world: a heap of events in which many production Peers live and fail. One rule:
whatever happens in here is drawn from one seed, so that every run can be had again byte for byte;
no clock, socket, thread or global random number."""
