"""Celery tasks that report what they did: one message at once, and then at most one every five minutes.

The tasks add; a worker of aiodigest delivers. Run both, with a Redis or Valkey on this machine, and start a task:

    cd examples && celery -A celery_app worker
    cd examples && aiodigest run celery_app:mail
    cd examples && celery -A celery_app call celery_app.resize --args '["ann@example.org", "cat.jpg"]'
"""

from __future__ import annotations

import os

from celery import Celery, Task
from pydantic import BaseModel

from aiodigest import BackendUnavailable, Digest, DigestEngine, Policy

REDIS = os.environ.get("REDIS_URL", "redis://localhost:6379/0")


class Resized(BaseModel):
    picture: str


app = Celery("celery_app", broker=REDIS)
mail = DigestEngine(REDIS, namespace="pictures", value_type=Resized, policy=Policy(minimum_delay=300))


@mail.deliver
async def send_mail(digest: Digest[Resized]) -> None:
    pictures = ", ".join(record.value.picture for record in digest.records)
    print(f"mail to {digest.key}: resized {pictures}", flush=True)


@app.task(bind=True, autoretry_for=(BackendUnavailable,), retry_backoff=True, max_retries=10)
def resize(task: Task[[str, str], None], owner: str, picture: str) -> None:
    # the work itself stands here
    mail.sync.add(owner, Resized(picture=picture), record_id=task.request.id)  # run again, it adds no second record
