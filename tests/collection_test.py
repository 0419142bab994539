import fnmatch
import pathlib

_TESTS = pathlib.Path(__file__).parent


def test_no_directory_of_tests_is_passed_over(request):
  names = {
    part
    for path in _TESTS.rglob('*_test.py')
    for part in path.parent.relative_to(_TESTS).parts
  }
  assert 'build' in names
  patterns = request.config.getini('norecursedirs')
  assert not [n for n in names for p in patterns if fnmatch.fnmatch(n, p)]
