import json
import urllib.request


def _get(url):
  with urllib.request.urlopen(url, timeout=10) as answer:
    return answer.status, json.loads(answer.read() or 'null')


def test_real_servers_are_ready_with_no_version(servers):
  assert len(servers.urls) == 2
  for url in servers.urls:
    status, info = _get(f'{url}/model_info')
    assert status == 200
    assert info['weight_version'] == 'none'
