"""A Django site that tells people about comments: at once, and then at most every five minutes.

Its views add; a worker of its own delivers. Run both, and try it:

    gunicorn --chdir examples --workers 2 --threads 4 django_app
    cd examples && aiodigest run django_app:mail
    curl -d '{"author": "ann", "text": "hello"}' localhost:8000/users/bob/comments
"""

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from pydantic import BaseModel, ValidationError

from aiodigest import BackendUnavailable, Digest, DigestEngine, Policy

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="of this example")


class Comment(BaseModel):
    author: str
    text: str


mail = DigestEngine(namespace="comments", value_type=Comment, policy=Policy(minimum_delay=300))


@mail.deliver
async def send_mail(digest: Digest[Comment]) -> None:
    authors = ", ".join(comment.value.author for comment in digest.records)
    print(f"mail to {digest.key}: {len(digest.records)} new from {authors}", flush=True)


@csrf_exempt
@require_POST
def add_comment(request: HttpRequest, user: str) -> HttpResponse:
    try:
        comment = Comment.model_validate_json(request.body)
        due_now = mail.sync.add(user, comment)  # stored when this returns
    except ValidationError as error:
        return HttpResponse(error.json(include_url=False), status=422, content_type="application/json")
    except BackendUnavailable:
        return JsonResponse({"detail": "come again later"}, status=503)
    return JsonResponse({"due_now": due_now}, status=202)


urlpatterns = [path("users/<user>/comments", add_comment)]
application = get_wsgi_application()
