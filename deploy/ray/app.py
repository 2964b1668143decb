"""The application that Ray Serve runs: fronts that take HTTP, and engines that autoscale.

    serve run deploy/ray/serve.yaml

Knows Serve's options; what the parts do is theirs.
"""

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deploy.ray.arguments import Arguments
from deploy.ray.engines import Engines
from deploy.ray.front import Front

# Requests that run beside those that wait. The engines refuse what is too much themselves, since
# they know deadlines; nothing is to wait in front of them.
_RUNNING = 256
_METRICS_S, _LOOK_BACK_S = 2.0, 10.0
_HEALTH_S, _HEALTH_TIMEOUT_S = 2.0, 10.0
_DRAIN_POLL_S = 0.5
_LAST_S = 5.0  # for what has been answered to be taken


def build(arguments: Arguments, replica: type[Engines] = Engines) -> Application:
    """The application, for the `args` of a Serve config."""
    settings = arguments.read_settings()
    scaling = AutoscalingConfig(
        min_replicas=arguments.min_replicas,
        max_replicas=arguments.max_replicas,
        metrics_interval_s=_METRICS_S,
        look_back_period_s=_LOOK_BACK_S,
        upscale_delay_s=arguments.scale_up_s,
        downscale_delay_s=arguments.scale_down_s,
        policy=AutoscalingPolicy(
            policy_function="deploy.ray.scaling:QueueAndDeadlines",
            policy_kwargs={
                "queue_depth": arguments.queue_depth,
                "attainment": arguments.attainment,
                "busy": arguments.busy,
            },
        ),
    )
    engines = serve.deployment(
        name="Engines",
        max_ongoing_requests=settings.queue_limit + _RUNNING,
        autoscaling_config=scaling,
        request_router_config={
            "request_router_class": "deploy.ray.routing:ModelRouter",
            "request_router_kwargs": {"spill_requests": arguments.spill_requests},
        },
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        graceful_shutdown_timeout_s=settings.drain_s + _LAST_S,
    )(replica)
    front = serve.deployment(
        name="Front",
        num_replicas=arguments.fronts,
        max_ongoing_requests=settings.max_connections,
        ray_actor_options={"num_cpus": 0, "resources": {arguments.front_resource: 0.001}},
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        graceful_shutdown_timeout_s=settings.drain_s + _LAST_S,
    )(Front)
    return front.bind(engines.bind(arguments), arguments)
