# SPDX-License-Identifier: Apache-2.0
"""The HTTP front: OpenAI's API, Anthropic's and what belongs to them, over Starlette on uvicorn.

Each API is a module with `routes(desk)`, listed in `app.APIS`. A handler gets a `Desk` and what was `Asked`, and gives
a Starlette response; `Endpoint` around it knows callers, bodies, errors and clients that go. Turns bodies into
`serving.core` calls and events into bodies; decides nothing about generation. The folder `page` is a page to chat on,
without a build: `page.py` serves its files, and it talks to the API as anybody would.
"""
