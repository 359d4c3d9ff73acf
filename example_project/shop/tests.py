"""The five policies of the shop, and the words of its pages, tested with the testing kit: `python manage.py test`.

No Redis and no worker is needed, and nothing waits.
"""

from __future__ import annotations

from datetime import timedelta

from django.test import TestCase, override_settings
from django.urls import reverse

from django_delayq import DeadlinePassed, before_deadline, clock
from django_delayq.testing import assert_cancelled, assert_fired, assert_scheduled, fire_due, perform, travel
from shop.models import Customer, Order, Outage, Review, TextMessage
from shop.views.waits import progress_of


@override_settings(DELAYQ={"REDIS": None})
class ShopTests(TestCase):
    def setUp(self) -> None:
        self.customer = Customer.objects.create(name="Ada", phone="+55 11 5550 0001")
        self.order = Order.objects.place(self.customer, "Moka pot", 1999)

    def deliver(self, promised: timedelta | None = None) -> None:
        """Pay and accept the order, and deliver it unless a time of delivery is promised."""
        self.order.pay()
        self.order.accept("Ben's kitchen", None if promised is None else clock.now() + promised)
        if promised is None:
            self.order.deliver()

    def test_an_unpaid_order_is_cancelled(self) -> None:
        assert_scheduled(self.order, "cancel_unpaid", due=self.order.placed_at + timedelta(minutes=30))
        travel(minutes=31)
        self.assertEqual(fire_due("cancel_unpaid", self.order), 1)
        self.order.refresh_from_db()
        self.assertEqual(self.order.get_cancel_reason_display(), "not paid in time")
        with self.assertRaises(DeadlinePassed), before_deadline(self.order, "cancel_unpaid"):
            self.order.pay()

    def test_a_payment_cancels_the_timeout_and_starts_the_time_of_the_merchant(self) -> None:
        with before_deadline(self.order, "cancel_unpaid"):
            self.order.pay()
        assert_cancelled(self.order, "cancel_unpaid")
        assert_scheduled(self.order, "cancel_unaccepted", due=timedelta(minutes=5))

    def test_orders_that_are_paid_together_are_not_cancelled(self) -> None:
        Order.objects.update(status=Order.Status.PAID, paid_at=clock.now())
        assert_cancelled(self.order, "cancel_unpaid")
        assert_scheduled(self.order, "cancel_unaccepted")

    def test_a_late_parcel_brings_one_text_message(self) -> None:
        self.deliver(promised=timedelta(hours=1))
        travel(minutes=61)
        fire_due()
        assert_fired(self.order.delivery, "remind_late_delivery")
        self.assertEqual(TextMessage.objects.filter(recipient=self.customer.phone).count(), 1)

    def test_a_provider_that_does_not_answer_is_called_again(self) -> None:
        self.deliver(promised=timedelta(hours=1))
        Outage.objects.create(began_at=clock.now())
        travel(hours=2)
        fire_due(obj=self.order.delivery, raises=False)
        self.assertTrue(self.order.delivery.timeouts.get().is_failing)
        Outage.objects.all().delete()
        travel(days=3)
        fire_due(obj=self.order.delivery)
        self.assertEqual(progress_of(self.order).results[-1], "Text message sent, 3 d late, with attempt 2.")

    def test_silence_after_the_delivery_counts_as_five_stars(self) -> None:
        self.deliver()
        perform("review_by_default", self.order.review)
        self.assertEqual(Review.objects.get(order=self.order).score, 5)

    def test_a_trial_ends_after_three_days(self) -> None:
        travel(days=2, hours=23)
        self.assertEqual(fire_due(obj=self.customer.trial), 0)
        travel(hours=2)
        self.assertEqual(fire_due(obj=self.customer.trial), 1)

    def test_the_front_page_reports_what_has_come_of_an_order(self) -> None:
        played = self.client.post(reverse("shop:play", args=["pay-late"]), follow=True)
        self.assertContains(played, "Time left to pay")
        travel(days=3)
        fire_due("shop.order.cancel_unpaid")
        shown = self.client.get(reverse("shop:index"))
        self.assertContains(shown, "Cancelled as unpaid, 3 d after the order, 3 d late.")
        self.assertContains(shown, "Pay all the same")
