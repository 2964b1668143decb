"""GET and POST /admin/models, DELETE /admin/models/{name}: what is served, changed while it is.

Only for whoever has an admin key, which is another than the API keys. Knows the shape of requests
and answers; how models are loaded is elsewhere.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.engine import Engine
from serve.errors import AdminOff, Unauthorized
from serve.keys import Keys
from serve.loading import Loading
from serve.routes.shared import answer, problems, takes
from serve.setting_names import ADMIN_KEY_VARIABLE
from serve.wire.body import read_json
from serve.wire.gate import secret_of
from serve.wire.loaded import (
    LoadedModel,
    LoadedModels,
    LoadRequest,
    LoadResponse,
    UnloadResponse,
)
from serve.wire.reader import Reader

_KEY_PROBLEMS = problems(
    e401="No admin key, or one that is not known.",
    e403="The server was started without an admin key, or a page of another address asks.",
    e429="The admin key has sent too many requests.",
)
_UNKNOWN = problems(e404="No such model is served.")
_LOAD_PROBLEMS = problems(
    e400="The body is not JSON that can be read.",
    e403="There is no admin key, or the folder is not one that may be loaded from.",
    e408="The body did not arrive in time.",
    e413="The body is too large.",
    e422="The body is not as documented, or the bundle cannot be served; nothing has changed.",
    e503="The server is shutting down.",
)


def admin_routes(engine: Engine, loading: Loading, keys: Keys, reader: Reader) -> APIRouter:
    """The routes, for an engine."""
    router = APIRouter(tags=["admin"])

    @router.get(
        "/admin/models",
        summary="Every model in the server",
        response_model=LoadedModels,
        response_description="What is served, and what leaves.",
        responses=_KEY_PROBLEMS,
    )
    async def loaded(request: Request) -> Response:
        _check_key(request, keys)
        serving = [LoadedModel.of(served, "serving") for served in engine.catalog]
        leaving = [LoadedModel.of(served, "leaving") for served in engine.leaving]
        return answer(LoadedModels(models=serving + leaving))

    @router.post(
        "/admin/models",
        summary="Load a bundle, or swap it for the one of its name",
        response_model=LoadResponse,
        response_description="It is served; requests that were with another finish there.",
        responses={**_KEY_PROBLEMS, **_LOAD_PROBLEMS},
        openapi_extra=takes(LoadRequest),
    )
    async def load(request: Request) -> Response:
        _check_key(request, keys)
        asked = await read_json(request, LoadRequest, reader)
        change = await loading.load(loading.allowed(asked.bundle))
        return answer(
            LoadResponse(
                loaded=LoadedModel.of(change.loaded, "serving"),
                replaced=(
                    None if change.replaced is None else LoadedModel.of(change.replaced, "leaving")
                ),
                seconds=round(change.seconds, 3),
            )
        )

    @router.delete(
        "/admin/models/{name}",
        summary="Unload a model",
        response_model=UnloadResponse,
        response_description="It gets no new requests; those that it has go on.",
        responses={**_KEY_PROBLEMS, **_UNKNOWN},
    )
    async def unload(request: Request, name: str) -> Response:
        _check_key(request, keys)
        served = await loading.unload(name)
        return answer(UnloadResponse(unloaded=LoadedModel.of(served, "leaving")))

    return router


def _check_key(request: Request, keys: Keys) -> None:
    """AdminOff where nobody may, Unauthorized for whoever may not."""
    if not keys:
        raise AdminOff(
            f"the admin routes are off: set {ADMIN_KEY_VARIABLE} to a key of your own, or name a "
            "file with --admin-keys-file, and start the server again"
        )
    secret = secret_of(request.scope["headers"])
    holder = None if secret is None else keys.holder_of(secret)
    if holder is None:
        raise Unauthorized(
            "this needs an admin key, which is not one of the API keys: send it as "
            "`Authorization: Bearer KEY`"
        )
    holder.enter()
    holder.leave()
