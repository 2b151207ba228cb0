"""The engine behind HTTP: requests that come at any time join its running batch. `docs/serving.md` says how it is used.

Starlette and uvicorn (the extra `serve`) are imported by `app` and `http_server` alone, which only a server imports.
"""
