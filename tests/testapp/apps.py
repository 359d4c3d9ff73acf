import os
import signal

from django.apps import AppConfig


class TestappConfig(AppConfig):
    name = "tests.testapp"
    label = "testapp"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """With `DELAYQ_TEST_KILL_AT=<step>` this process is killed at that step of its first firing that gets there.

        With `DELAYQ_TEST_STOP_AT=<step>` it is stopped there, once, until a test continues it.
        """
        from django_delayq.firing.handler import set_checkpoint_hook

        deadly, pausing = os.environ.get("DELAYQ_TEST_KILL_AT"), os.environ.get("DELAYQ_TEST_STOP_AT")
        left = [pausing]

        def reached(step: str) -> None:
            if step == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            if step in left:
                left.clear()
                os.kill(os.getpid(), signal.SIGSTOP)

        if deadly or pausing:
            set_checkpoint_hook(reached)
