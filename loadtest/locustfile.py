"""The simulated callers. Works by itself: `locust -f loadtest/locustfile.py --host URL`.

In a closed loop each user sends one request after another, as the plan deals them out; in an open
loop there is one user in each process, which sends its share of the schedule.
Only the process that Locust starts imports this file: it patches sockets and threads.
It deliberately knows nothing of what is asked and of how a report looks.
"""

import sys
import time
from pathlib import Path
from typing import Any

import gevent
from gevent.hub import get_hub
from locust import User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopTest, StopUser
from locust.rpc import Message
from locust.runners import MasterRunner, WorkerRunner
from locust.user.task import LOCUST_STATE_RUNNING

from loadtest.answers import AnswerError
from loadtest.exchange import CUT_SHORT, Line
from loadtest.generator import Gauge, Generator
from loadtest.open_loop import OpenLoop, Share
from loadtest.options import add_shared, complaint, terms_of
from loadtest.outcomes import Outcome, write_requests
from loadtest.plan import REFUSALS, Plan
from loadtest.report import Report, render_json
from loadtest.tables import render_text
from loadtest.target import read_offers

_SHARE, _SENT = "stepdial_share", "stepdial_sent"  # messages between master and workers
_LEAD_S = 2.0  # in which workers lay out their schedule, before the first request is due
_OVER = ("stopping", "stopped", "cleanup")

_plans: dict[Environment, Plan] = {}
_gauges: dict[Environment, Gauge] = {}
_shares: dict[Environment, Share] = {}


class Caller(User):
    """One client with kept-alive connections."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._plan = _plans[environment]
        self._line = Line(self._plan, connections=1)

    @task
    def ask(self) -> None:
        """Send one request after another until told to stop, or the whole of a schedule."""
        if self._plan.terms.open:
            self._send_share()
            raise StopUser
        # A task that comes back would be between tasks for a moment, in which Locust ends a user at
        # once: by then in the midst of its next request, whose answer would be lost.
        error = None
        while self._state == LOCUST_STATE_RUNNING and error != CUT_SHORT:
            shot, body = self._plan.next_request()
            outcome = self._line.send(shot, body, time.monotonic(), time.time())
            self._take(outcome)
            error = outcome.error
        raise StopUser

    def on_stop(self) -> None:
        """Leave no connection behind."""
        self._line.close()

    def _send_share(self) -> None:
        environment, runner = self.environment, self.environment.runner
        assert runner is not None, "users are run by a runner"
        loop = OpenLoop(self._plan, _shares[environment], self._take)
        self._plan.due = loop.run(lambda: runner.state in _OVER)
        data: dict[str, Any] = {"due": self._plan.due}
        if isinstance(runner, WorkerRunner):
            _hand_over(data)
        runner.send_message(_SENT, data)

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


def _add_options(parser: LocustArgumentParser) -> None:
    add_shared(parser, "--answer-timeout")


def _prepare(environment: Environment, **_: Any) -> None:
    # Timers count from when the loop last looked at the clock: before all the imports.
    get_hub().loop.update_now()
    runner = environment.runner
    if runner is not None:
        handle = _take_share if isinstance(runner, WorkerRunner) else _take_sent
        runner.register_message(_SHARE if isinstance(runner, WorkerRunner) else _SENT, handle)
    if environment.web_ui is not None and environment.web_ui.app is not None:
        pages = environment.web_ui.app
        pages.add_url_rule("/steps", "steps", lambda: _report_page(environment))


def _report_page(environment: Environment) -> str:
    plan = _plans.get(environment)
    if plan is None:
        return "No test has been started yet."
    # Draws pictures, which takes a second to load: only who looks at them waits for it.
    from loadtest.page import render_html

    return render_html(_report(environment, plan))


def _start(environment: Environment, **_: Any) -> None:
    _plans.pop(environment, None)
    options = environment.parsed_options
    assert options is not None, "Locust always parses its command line"
    try:
        if wrong := complaint(options):
            raise StopTest(wrong)
        terms = terms_of(options, environment.host)
        plan = Plan(terms, read_offers(terms.url))
        if terms.open and not isinstance(environment.runner, WorkerRunner):
            _share_out(environment, plan)
    except (StopTest, *REFUSALS) as error:
        environment.process_exit_code = 2
        raise StopTest(str(error)) from None
    _plans[environment] = plan
    if not isinstance(environment.runner, MasterRunner):
        _gauges[environment] = gauge = Gauge()
        gevent.spawn(_keep_gauge, environment, plan, gauge)
    if sys.stderr.isatty() and not isinstance(environment.runner, WorkerRunner):
        gevent.spawn(_show_progress, environment, plan)


def _share_out(environment: Environment, plan: Plan) -> None:
    """Tell every sender which part of the schedule is its own, and when it begins."""
    runner = environment.runner
    assert runner is not None, "a test that starts has a runner"
    distributed = isinstance(runner, MasterRunner)
    workers = [*runner.clients] if isinstance(runner, MasterRunner) else ["local"]
    if runner.target_user_count != len(workers):
        raise StopTest(
            f"An open loop has one user in each process that sends: -u {len(workers)}, "
            f"not -u {runner.target_user_count}."
        )
    plan.senders = len(workers)
    begin_s = time.time() + (_LEAD_S if distributed else 0.0)
    plan.begin_s = begin_s
    for index, worker in enumerate(workers):
        share = {"index": index, "of": len(workers), "begin_s": begin_s}
        if distributed:
            runner.send_message(_SHARE, share, client_id=worker)
        else:
            _shares[environment] = Share.from_wire(share)


def _take_share(environment: Environment, msg: Message, **_: Any) -> None:
    _shares[environment] = Share.from_wire(msg.data)


def _take_sent(environment: Environment, msg: Message, **_: Any) -> None:
    """One sender has all its answers; when all have, the test is over."""
    plan, runner = _plans[environment], environment.runner
    _take_over(msg.data, msg.node_id)
    plan.senders_done += 1
    if isinstance(runner, MasterRunner):
        plan.due += msg.data["due"]
    if plan.senders_done == plan.senders and runner is not None and runner.state not in _OVER:
        headless = environment.web_ui is None
        gevent.spawn(runner.quit if headless else runner.stop)


def _stop(environment: Environment, **_: Any) -> None:
    # With worker processes and no page, the last outcomes arrive only after this.
    if isinstance(environment.runner, MasterRunner) and environment.web_ui is None:
        return
    _publish(environment)


def _quit(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, MasterRunner) and environment.web_ui is None:
        _publish(environment)


def _publish(environment: Environment) -> None:
    plan = _plans.get(environment)
    if plan is None or isinstance(environment.runner, WorkerRunner):
        return
    report = _report(environment, plan)
    print("\n" + render_text(report), flush=True)
    options = environment.parsed_options
    if options is not None and options.out:
        _keep(report, plan, Path(options.out), options.keep_requests)
        print(f"Report written to {options.out}.", flush=True)
    environment.process_exit_code = 0 if report.passed else 1


def _keep(report: Report, plan: Plan, path: Path, requests: bool) -> None:
    """All forms in a folder, or only the JSON in a file of that name."""
    folder = path.parent if path.suffix == ".json" else path
    folder.mkdir(parents=True, exist_ok=True)
    if requests:
        write_requests(plan.outcomes, folder / "requests.csv")
    if folder != path:
        path.write_text(render_json(report), encoding="utf-8")
        return
    # Draws pictures, which takes a second to load: only who wants them waits for it.
    from loadtest.writing import write_report

    write_report(report, folder)


def _hand_over(data: dict[str, Any], **_: Any) -> None:
    for environment, plan in _plans.items():
        data["outcomes"] = [outcome.to_wire() for outcome in plan.outcomes]
        plan.outcomes.clear()
        data["generator"] = _gauges[environment].read().to_wire()


def _take_over(data: dict[str, Any], client_id: str, **_: Any) -> None:
    for plan in _plans.values():
        plan.outcomes += map(Outcome.from_wire, data.get("outcomes", ()))
        if "generator" in data:
            plan.generators[client_id] = Generator.from_wire(data["generator"])


def _report(environment: Environment, plan: Plan) -> Report:
    runner = environment.runner
    if environment in _gauges:
        plan.generators["local"] = _gauges[environment].read()
    return plan.report(users=runner.target_user_count if runner else 0)


def _keep_gauge(environment: Environment, plan: Plan, gauge: Gauge) -> None:
    while _plans.get(environment) is plan:
        gevent.sleep(1)
        gauge.mark()


def _show_progress(environment: Environment, plan: Plan) -> None:
    begin_s = time.monotonic()
    while _plans.get(environment) is plan and environment.runner is not None:
        if environment.runner.state in _OVER:
            break
        errors = sum(outcome.error is not None for outcome in plan.outcomes)
        line = f"{time.monotonic() - begin_s:4.0f} s: {len(plan.outcomes)} answers, {errors} errors"
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
        gevent.sleep(1)


events.init_command_line_parser.add_listener(_add_options)
events.init.add_listener(_prepare)
events.test_start.add_listener(_start)
events.test_stop.add_listener(_stop)
events.quitting.add_listener(_quit)
events.report_to_master.add_listener(_hand_over)
events.worker_report.add_listener(_take_over)
