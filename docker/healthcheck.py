"""Exit status 0 if the server in this container answers /health with 200, else 1 and the reason on one line.

SGLang answers once it has generated a token, so a server that is still loading, or whose scheduler hangs, is not healthy.
"""

import http.client
import os
import sys

try:
    host = os.environ.get("HOST", "0.0.0.0")
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    # Not urllib: it would send the question to a proxy that the environment names.
    connection = http.client.HTTPConnection(loopback, int(os.environ.get("PORT", "30000")), timeout=22)
    connection.request("GET", "/health")
    status = connection.getresponse().status
except (OSError, http.client.HTTPException, ValueError) as reason:
    sys.exit(f"unhealthy: {type(reason).__name__}: {reason}")
if status != 200:
    sys.exit(f"unhealthy: /health answered {status}")
print("healthy")
