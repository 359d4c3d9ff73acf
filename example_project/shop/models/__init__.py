"""The models: customers and their trials, orders and their steps, text messages."""

from __future__ import annotations

from shop.models.customers import Customer, TrialMembership
from shop.models.messages import Outage, TextMessage
from shop.models.orders import CancelReason, Order, StepRefused
from shop.models.steps import Acceptance, Delivery, Review

__all__ = [
    "Acceptance",
    "CancelReason",
    "Customer",
    "Delivery",
    "Order",
    "Outage",
    "Review",
    "StepRefused",
    "TextMessage",
    "TrialMembership",
]
