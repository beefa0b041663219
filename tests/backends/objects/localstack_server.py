"""LocalStack's S3 as a process, run by the Python it is installed for: ``python localstack_server.py PORT``.

LocalStack's own program also makes certificates, answers for domain names, and takes over a container. This is only
what answers requests, behind the web server that its program uses.
"""

from __future__ import annotations

import sys

from localstack.aws.app import LocalstackAwsGateway
from localstack.services.plugins import SERVICE_PLUGINS
from rolo.serving.twisted import TwistedGateway
from twisted.internet import endpoints, reactor

N_THREADS = 64

if __name__ == "__main__":
    site = TwistedGateway(LocalstackAwsGateway(SERVICE_PLUGINS))
    reactor.suggestThreadPoolSize(N_THREADS)
    endpoints.TCP4ServerEndpoint(reactor, int(sys.argv[1]), interface="127.0.0.1").listen(site)
    reactor.run()
