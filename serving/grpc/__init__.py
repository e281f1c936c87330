# SPDX-License-Identifier: Apache-2.0
"""The gRPC front: protos and their stubs, the Generate service, KServe's Open Inference Protocol beside it.

Turns messages into `serving.core` calls and events into messages; decides nothing about generation.
"""
