"""A receiver for the alerts of Prometheus' Alertmanager, which tells each team once of what belongs together.

Run it, and send it what Alertmanager sends:

    uvicorn --app-dir examples --port 9094 alerts:app
    curl -H 'Content-Type: application/json' localhost:9094/alerts -d '{"alerts": [{"fingerprint": "c0ffee",
        "status": "firing", "labels": {"alertname": "DiskFull", "team": "db", "severity": "warning"},
        "annotations": {"summary": "disk of db-1 is 95% full"}}]}'

In earnest, put ``Slack(...)`` or ``SMTP(...)`` in the place of ``Console(...)``.
"""

from fastapi import FastAPI
from pydantic import BaseModel

from aiodigest import BackendUnavailable, DigestEngine, Policy
from aiodigest.channels import Console
from aiodigest.integrations.fastapi import answer_unavailable
from aiodigest.rendering import Template


class Alert(BaseModel):
    fingerprint: str
    status: str
    labels: dict[str, str]
    annotations: dict[str, str] = {}

    @property
    def heading(self) -> str:
        return "Resolved" if self.status == "resolved" else self.labels.get("severity", "other").capitalize()


class Notification(BaseModel):
    alerts: list[Alert]


alerts = DigestEngine(
    namespace="alerts",
    value_type=Alert,
    # The first alert goes out 10 s later, with those that it brings along; then there is a message a minute at most.
    policy=Policy(initial_delay=10, minimum_delay=60, increment_delay=0, max_size=100),
)
alerts.deliver(Console(render=Template(group_by=lambda alert: alert.heading, fields=["annotations.summary", "labels"])))

app = FastAPI(lifespan=alerts.lifespan)
app.add_exception_handler(BackendUnavailable, answer_unavailable)  # 503: Alertmanager sends it again


@app.post("/alerts", status_code=202)
async def receive(notification: Notification) -> None:
    for alert in notification.alerts:
        # Under its fingerprint: what fires again, or is over before anybody heard of it, replaces what waits.
        await alerts.add(
            alert.labels.get("team", "nobody's"),
            alert,
            record_id=alert.fingerprint,
            urgent=alert.status == "firing" and alert.labels.get("severity") == "critical",
        )
