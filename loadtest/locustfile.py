"""The simulated callers. Works by itself: `locust -f loadtest/locustfile.py --host URL`.

Each caller sends one request after another, as the plan deals them out, and checks every answer.
Only the process that Locust starts imports this file: it patches sockets and threads.
It deliberately knows nothing of what is asked and of how a report looks.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gevent
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPSocketPoolResponse
from locust import User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopTest
from locust.runners import MasterRunner, WorkerRunner

from loadtest.answers import AnswerError, TokenStream, check_classification, describe_refusal
from loadtest.mix import SYNTAX, MixError, Operation
from loadtest.outcomes import Outcome
from loadtest.plan import DEFAULT_MAX_TOKENS, DEFAULT_TIMEOUT_S, DEFAULT_URL, Plan, Terms
from loadtest.report import Report, render_html, render_text, write_report
from loadtest.target import ENDPOINTS, TargetError, read_offers

_plans: dict[Environment, Plan] = {}


class Caller(User):
    """One client with one kept-alive connection, waiting for each answer before it asks again."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._plan = _plans[environment]
        terms = self._plan.terms
        self._prefix = urlsplit(terms.url).path.rstrip("/")
        self._client = HTTPClient.from_url(
            terms.url, connection_timeout=terms.timeout_s, network_timeout=terms.timeout_s
        )

    @task
    def ask(self) -> None:
        """Send the next request of the plan and keep what came of it."""
        operation, body = self._plan.next_request()
        stream = TokenStream(operation.steps) if operation.endpoint == "generate" else None
        error: str | None = None
        started_s, begin_s = time.time(), time.perf_counter()
        try:
            self._exchange(operation, body, stream)
        except AnswerError as wrong:
            error = str(wrong)
        except gevent.GreenletExit:
            error = "no answer before the end of the test"
            raise
        except Exception as broken:  # whatever a connection can do is one failed request
            error = f"{type(broken).__name__}: {broken}"
        finally:
            total_ms = (time.perf_counter() - begin_s) * 1e3
            timing = _timing(stream, begin_s)
            self._plan.outcomes.append(Outcome(operation, started_s, total_ms, error, **timing))
            self.environment.events.request.fire(
                request_type="POST",
                name=str(operation),
                response_time=total_ms,
                response_length=0,
                exception=AnswerError(error) if error else None,
                context={},
            )

    def on_stop(self) -> None:
        """Leave no connection behind."""
        self._client.close()

    def _exchange(
        self, operation: Operation, body: dict[str, Any], stream: TokenStream | None
    ) -> None:
        response = self._client.post(
            self._prefix + ENDPOINTS[operation.endpoint],
            body=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            if response.status_code != 200:
                raise AnswerError(describe_refusal(response.status_code, response.read()))
            if stream is None:
                check_classification(response.read(), operation.steps)
            else:
                _read_stream(response, stream)
        finally:
            response.release()


def _read_stream(response: HTTPSocketPoolResponse, stream: TokenStream) -> None:
    while line := response.readline(b"\n"):
        stream.feed(line, time.perf_counter())
    stream.finish()


def _timing(stream: TokenStream | None, begin_s: float) -> dict[str, Any]:
    if stream is None or stream.first_token_s is None or stream.last_token_s is None:
        return {}
    span_s = stream.last_token_s - stream.first_token_s
    return {
        "first_token_ms": (stream.first_token_s - begin_s) * 1e3,
        "tokens": stream.tokens,
        "stream_tokens_per_s": (stream.tokens - 1) / span_s if span_s > 0 else None,
    }


def _add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--mix", default="", help=SYNTAX.replace("%", "%%"))
    parser.add_argument(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, help="length of a generated text"
    )
    parser.add_argument(
        "--answer-timeout", type=float, default=DEFAULT_TIMEOUT_S, help="seconds of silence"
    )
    parser.add_argument("--out", default="", help="folder for the report")


def _add_page(environment: Environment, **_: Any) -> None:
    if environment.web_ui is not None and environment.web_ui.app is not None:
        pages = environment.web_ui.app
        pages.add_url_rule("/steps", "steps", lambda: _report_page(environment))


def _report_page(environment: Environment) -> str:
    plan = _plans.get(environment)
    if plan is None:
        return "No test has been started yet."
    return render_html(_report(environment, plan))


def _start(environment: Environment, **_: Any) -> None:
    _plans.pop(environment, None)
    options = environment.parsed_options
    assert options is not None, "Locust always parses its command line"
    terms = Terms(
        url=(environment.host or DEFAULT_URL).rstrip("/"),
        mix=options.mix,
        max_tokens=options.max_tokens,
        timeout_s=options.answer_timeout,
    )
    try:
        _plans[environment] = plan = Plan(terms, read_offers(terms.url))
    except (TargetError, MixError) as error:
        environment.process_exit_code = 2
        raise StopTest(str(error)) from None
    if sys.stderr.isatty() and not isinstance(environment.runner, WorkerRunner):
        gevent.spawn(_show_progress, environment, plan)


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
        write_report(report, Path(options.out))
        print(f"Report written to {options.out}.", flush=True)
    environment.process_exit_code = 0 if report.passed else 1


def _hand_over(data: dict[str, Any], **_: Any) -> None:
    for plan in _plans.values():
        data["outcomes"] = [outcome.to_wire() for outcome in plan.outcomes]
        plan.outcomes.clear()


def _take_over(data: dict[str, Any], **_: Any) -> None:
    for plan in _plans.values():
        plan.outcomes += map(Outcome.from_wire, data.get("outcomes", ()))


def _report(environment: Environment, plan: Plan) -> Report:
    runner = environment.runner
    return plan.report(users=runner.target_user_count if runner else 0)


def _show_progress(environment: Environment, plan: Plan) -> None:
    begin_s = time.monotonic()
    while _plans.get(environment) is plan and environment.runner is not None:
        if environment.runner.state in ("stopping", "stopped", "cleanup"):
            break
        errors = sum(outcome.error is not None for outcome in plan.outcomes)
        line = f"{time.monotonic() - begin_s:4.0f} s: {len(plan.outcomes)} answers, {errors} errors"
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
        gevent.sleep(1)


events.init_command_line_parser.add_listener(_add_options)
events.init.add_listener(_add_page)
events.test_start.add_listener(_start)
events.test_stop.add_listener(_stop)
events.quitting.add_listener(_quit)
events.report_to_master.add_listener(_hand_over)
events.worker_report.add_listener(_take_over)
