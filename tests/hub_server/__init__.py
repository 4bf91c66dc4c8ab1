"""A server on this machine that speaks the Hub's HTTP API, for the real client, and that can be told to fail."""

from tests.hub_server.faults import BadBytes, Cut, Fault, Slow, Status
from tests.hub_server.repositories import Repository, Store, User
from tests.hub_server.server import HubServer, running

__all__ = ["BadBytes", "Cut", "Fault", "HubServer", "Repository", "Slow", "Status", "Store", "User", "running"]
