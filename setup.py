"""Package metadata, read from settings.ini so that every fact has one home."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
settings = ConfigParser(delimiters='=')
settings.read(here / 'settings.ini', encoding='utf-8')
cfg = settings['DEFAULT']
suffix = '_requirements'

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'].split(),
    license='Apache-2.0', author=cfg['author'], author_email=cfg['author_email'], url=cfg['git_url'],
    long_description=(here / 'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    packages=[*find_packages(include=['hybridlab', 'hybridlab.*']), 'hybridlab.data'], package_dir={'hybridlab.data': 'data'},
    package_data={'hybridlab.data': ['*.toml', '*.csv', '*.json', '*.md', '*.npz']},
    install_requires=cfg['requirements'].split(),
    extras_require={key.removesuffix(suffix): cfg[key].split() for key in cfg if key.endswith(suffix)},
    # The nbdev entry point is what turns a backticked name in prose into a link.
    entry_points={'console_scripts': cfg['console_scripts'].split(), 'nbdev': ['hybridlab=hybridlab._modidx:d']},
)
