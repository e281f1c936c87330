# SPDX-License-Identifier: Apache-2.0
"""Chats beyond plain text, without any protocol: tools, their calls in an answer, and reasoning.

`tools` reads what a body says of tools; `plan` makes of a chat what the service is asked (messages, template variables,
params with a structure) and an `AnswerParser` for each answer, which gives `parts`. How a model writes its calls is a
dialect, one file in `dialects/`. Imports `metrale_jax.sampling.params` and nothing that needs jax; fronts import it.
"""
