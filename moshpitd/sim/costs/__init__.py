"""What an algorithm costs on a network: the alpha-beta-window model (latency, rate, TCP window).

`net` and `payload` are the two ends of it, `operations` what each algorithm asks of a network, and
three modes turn that into seconds: `steps.closed_form`, `steps.monte_carlo` and `events`. On top:
`calibration` (against published figures), `scaling` (to 100,000 peers), `choice` (which algorithm
where), and `rehearsal` (what a round of the real daemon takes). One rule: sizes come from the
codecs, layouts and schedules that the daemon itself uses; a formula here counts hops and copies,
and never guesses a byte.
"""
