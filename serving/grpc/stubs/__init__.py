# SPDX-License-Identifier: Apache-2.0
"""Made by `serving.grpc.protos.generate`; not edited by hand."""
