"""The generated code, under the names that the rest of the package uses. One rule: nobody imports
`moshpitd._pb` past this door, so that a change of the generator is a change of this file."""

from __future__ import annotations

from moshpitd._pb import daemon_pb2 as messages
from moshpitd._pb import daemon_pb2_grpc as services

API = 1
"""Sent in AttachRequest.api and written into the header page of every bucket."""

SERVICE = messages.DESCRIPTOR.services_by_name["Daemon"].full_name
"""For health and reflection: moshpitd.v1.Daemon."""

__all__ = ["API", "SERVICE", "messages", "services"]
