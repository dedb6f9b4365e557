"""Assign parameters to groups by the model's structure, with overrides by pattern and a reason for each."""

from muonsw.routing.groups import reasons_table as reasons_table
from muonsw.routing.groups import route as route
from muonsw.routing.groups import routing_table as routing_table
from muonsw.routing.roles import classify as classify
