"""One simulated caller, as Locust runs it.

In a closed loop each sends one request after another; in an open loop there is one in each process,
who sends its share of the schedule. Only the process that Locust starts imports this file.
It deliberately knows nothing of how a test begins and ends.
"""

import time

import gevent
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser
from locust.user.task import LOCUST_STATE_RUNNING

from loadtest.answers import AnswerError
from loadtest.crew import SENT
from loadtest.exchange import CUT_SHORT, Line
from loadtest.open_loop import OpenLoop, Share
from loadtest.outcomes import Outcome
from loadtest.plan import Plan
from loadtest.resting import rest_s

_LOOK_S = 0.1  # how often one who rests looks whether the test is over
OVER = ("stopping", "stopped", "cleanup")  # states of a runner

# Of the test that runs: Locust makes its users itself, and gives them nothing but this.
plans: dict[Environment, Plan] = {}
shares: dict[Environment, Share] = {}


class Caller(User):
    """One client with kept-alive connections."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._plan = plans[environment]
        self._line = Line(self._plan, connections=1)

    @task
    def ask(self) -> None:
        """Send one request after another until told to stop, or the whole of a schedule."""
        if self._plan.terms.open:
            self._send_share()
            raise StopUser
        # A task that comes back would be between tasks for a moment, in which Locust ends a user at
        # once: by then in the midst of its next request, whose answer would be lost.
        plan, error = self._plan, None
        share = shares.pop(self.environment, None)
        if share is not None and plan.left is not None:
            plan.left = share.of_count(plan.left)
        while self._state == LOCUST_STATE_RUNNING and error != CUT_SHORT and plan.left != 0:
            shot, body = plan.next_request()
            plan.under_way += 1
            outcome = self._line.send(shot, body, time.monotonic(), time.time())
            plan.under_way -= 1
            self._take(outcome)
            error = outcome.error
            if plan.left != 0:
                self._rest(max(rest_s(outcome, plan.terms.max_rest_s), plan.think_s()))
        if plan.left == plan.under_way == 0:
            self._tell_sent()
        raise StopUser

    def on_stop(self) -> None:
        """Leave no connection behind."""
        self._line.close()

    def _rest(self, seconds: float) -> None:
        """Until then, or until told to stop."""
        until_s = time.monotonic() + seconds
        while self._state == LOCUST_STATE_RUNNING and (left_s := until_s - time.monotonic()) > 0:
            gevent.sleep(min(left_s, _LOOK_S))

    def _send_share(self) -> None:
        environment, runner = self.environment, self.environment.runner
        assert runner is not None, "users are run by a runner"
        share = shares.pop(environment, None)
        if share is None:  # a user who was added from the page: another sends all of it
            return
        OpenLoop(self._plan, share, self._take).run(lambda: runner.state in OVER)
        self._tell_sent()

    def _tell_sent(self) -> None:
        runner = self.environment.runner
        assert runner is not None, "users are run by a runner"
        runner.send_message(SENT)

    def _take(self, outcome: Outcome) -> None:
        self._plan.outcomes.append(outcome)
        self.environment.events.request.fire(
            request_type="POST",
            name=str(outcome.operation),
            response_time=outcome.total_ms,
            response_length=0,
            exception=AnswerError(outcome.error) if outcome.error else None,
            context={},
        )
