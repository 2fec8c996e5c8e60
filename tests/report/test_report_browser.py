"""The report in a real browser: its script and style, and that it makes no requests."""

import base64
import json
import shutil

import pytest
from test_report import BARE, make_data, make_record

from vitzoo.report.page import render

webdriver = pytest.importorskip('selenium.webdriver', reason="needs selenium: pip install -e '.[test]'")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
DRIVER = shutil.which('chromedriver')
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason='needs a browser: apt-get install chromium chromium-driver'
)
# the longest of the names
ROWS = [
    {**BARE, 'weights': 'random weights', 'img_size': 224},
    {**make_record(0), 'imagenet_v2_matched_frequency_top1': 30.0},
    *(make_record(number) for number in (1, 2)),
]


@pytest.fixture(scope='module')
def driver(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # a container's root has no sandbox, and little shared memory
    for argument in ('headless', 'no-sandbox', 'disable-gpu', 'disable-dev-shm-usage', 'window-size=1280,900'):
        options.add_argument(f'--{argument}')
    options.add_argument(f'--user-data-dir={tmp_path_factory.mktemp("profile")}')
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL', 'performance': 'ALL'})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield browser
    browser.quit()


@pytest.fixture(scope='module')
def address(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp('report') / 'index.html'
    path.write_text(render(make_data(*ROWS)), encoding='utf-8')
    return path.as_uri()


@pytest.fixture
def browser(driver, address):
    """The page, opened from disk in a wide window with the light theme and empty local storage."""
    driver.set_window_size(1280, 900)
    emulate(driver, 'prefers-color-scheme', 'light')
    driver.get(address)
    driver.execute_script('localStorage.clear(); scrollTo(0, 0)')
    driver.get(address)
    return driver


def emulate(driver, feature: str, value: str) -> None:
    driver.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': [{'name': feature, 'value': value}]})


def column(browser, number: int) -> list[str | None]:
    """The unrounded values of a column, from top to bottom."""
    script = (
        "return [...document.getElementById('table').tBodies[0].rows].map(r => r.cells[arguments[0]].dataset.value)"
    )
    return browser.execute_script(script, number)


def background(browser) -> str:
    return browser.execute_script('return getComputedStyle(document.body).backgroundColor')


def test_a_click_on_a_heading_sorts_the_rows_by_its_numbers(browser):
    headings = browser.find_elements(By.CSS_SELECTOR, '#table thead th')
    assert len(headings) == 15
    for number, heading in enumerate(headings):
        is_text = 'text' in heading.get_attribute('class')
        orders = []
        for _ in range(2):
            heading.find_element(By.TAG_NAME, 'button').click()
            orders.append(heading.get_attribute('aria-sort'))
            values = column(browser, number)
            known = [value for value in values if value is not None]
            assert values[: len(known)] == known, 'a missing number is not at the end'
            ordered = sorted(known, key=str if is_text else float, reverse=orders[-1] == 'descending')
            assert known == ordered
        assert sorted(orders) == ['ascending', 'descending']
        sorted_by = [other for other in headings if other.get_attribute('aria-sort') != 'none']
        assert sorted_by == [heading]


def test_the_first_click_puts_the_best_on_top(browser):
    button = {b.text.split('\n')[0]: b for b in browser.find_elements(By.CSS_SELECTOR, '#table thead button')}
    button['loss'].click()
    assert column(browser, 0)[0] == 'model_0'
    button['speed'].click()
    assert column(browser, 0)[0] == 'model_0'
    button['parameters'].click()
    assert column(browser, 0)[0] == 'model_0' and column(browser, 0)[-1] == 'resnet50'


def test_the_table_is_sorted_by_accuracy_at_first(browser):
    heading = browser.find_element(By.CSS_SELECTOR, '#table thead th:nth-child(2)')
    assert heading.get_attribute('aria-sort') == 'descending'
    assert column(browser, 0) == ['model_0', 'model_1', 'model_2', 'resnet50']
    heading.find_element(By.TAG_NAME, 'button').click()
    assert column(browser, 0) == ['model_2', 'model_1', 'model_0', 'resnet50']


def test_the_keyboard_sorts_too(browser):
    button = browser.find_element(By.CSS_SELECTOR, '#table thead th:first-child button')
    browser.execute_script('arguments[0].focus()', button)
    ActionChains(browser).send_keys(Keys.ENTER).perform()
    assert column(browser, 0) == ['model_0', 'model_1', 'model_2', 'resnet50']
    ActionChains(browser).send_keys(Keys.SPACE).perform()
    assert column(browser, 0) == ['resnet50', 'model_2', 'model_1', 'model_0']


def test_the_console_stays_silent_and_nothing_is_requested(browser, address):
    for kind in ('browser', 'performance'):
        browser.get_log(kind)
    browser.get(address)
    for button in browser.find_elements(By.CSS_SELECTOR, 'button'):
        button.click()
    for number in browser.find_elements(By.CSS_SELECTOR, 'summary'):
        browser.execute_script('arguments[0].click()', number)
    assert browser.get_log('browser') == []
    events = [json.loads(entry['message'])['message'] for entry in browser.get_log('performance')]
    requests = [e['params']['request']['url'] for e in events if e['method'] == 'Network.requestWillBeSent']
    assert [url for url in requests if not url.startswith('data:')] == [address]


def test_the_page_follows_the_system_and_its_button(browser, address):
    assert background(browser) == 'rgb(255, 255, 255)'
    emulate(browser, 'prefers-color-scheme', 'dark')
    dark = background(browser)
    assert dark == 'rgb(21, 23, 26)'
    button = browser.find_element(By.ID, 'theme')
    # the change event is asynchronous
    WebDriverWait(browser, 5).until(lambda _: button.text == 'Light')
    assert button.get_attribute('aria-pressed') == 'true'
    button.click()
    assert background(browser) == 'rgb(255, 255, 255)'
    assert (button.text, button.get_attribute('aria-pressed')) == ('Dark', 'false')
    browser.get(address)
    assert background(browser) == 'rgb(255, 255, 255)', 'the choice is forgotten'
    browser.find_element(By.ID, 'theme').click()
    assert background(browser) == dark


def test_colours_of_charts_follow_the_page(browser):
    script = "return getComputedStyle(document.querySelector('.mark.m0')).fill"
    light = browser.execute_script(script)
    browser.find_element(By.ID, 'theme').click()
    assert browser.execute_script(script) != light


def test_pointing_at_a_mark_says_its_numbers_and_shows_its_model_everywhere(browser):
    mark = browser.find_element(By.CSS_SELECTOR, '#cost svg .mark[data-model="1"]')
    browser.execute_script('arguments[0].scrollIntoView({block: "center", behavior: "instant"})', mark)
    ActionChains(browser).move_to_element(mark).perform()
    tip = browser.find_element(By.ID, 'tip')
    assert tip.is_displayed() and tip.text == 'model_1: 38.10 %, 0.2 GMACs'
    faded = browser.execute_script("return [...document.querySelectorAll('.faded')].map(m => m.dataset.model)")
    assert set(faded) == {'0', '2', '3'}
    assert browser.execute_script('return document.querySelectorAll(".faded[data-model=\'1\']").length') == 0
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, 'h1')).perform()
    assert not tip.is_displayed()
    assert browser.find_elements(By.CLASS_NAME, 'faded') == []


def test_every_chart_is_drawn_and_has_a_name(browser):
    charts = browser.find_elements(By.CSS_SELECTOR, 'svg[role="img"]')
    assert len(charts) == 16
    for chart in charts:
        assert chart.get_attribute('aria-label')
        assert chart.size['width'] > 100 and chart.size['height'] > 60
        assert chart.find_elements(By.CSS_SELECTOR, '.mark')


@pytest.mark.parametrize('name', ['text', '.mark'])
def test_nothing_of_a_chart_is_cut_off(browser, name):
    script = """
        const outside = [];
        for (const chart of document.querySelectorAll('svg[role="img"]')) {
            const box = chart.getBoundingClientRect();
            for (const part of chart.querySelectorAll(arguments[0])) {
                const inner = part.getBoundingClientRect();
                if (inner.left < box.left - 1 || inner.right > box.right + 1) outside.push(part.outerHTML);
                if (inner.top < box.top - 1 || inner.bottom > box.bottom + 1) outside.push(part.outerHTML);
            }
        }
        return outside;
    """
    assert browser.execute_script(script, name) == []


@pytest.mark.parametrize('width', [1280, 768, 500])
def test_only_wide_parts_scroll_sideways(browser, width):
    browser.set_window_size(width, 900)
    inner, page = browser.execute_script('return [innerWidth, document.documentElement.scrollWidth]')
    assert inner <= width and page <= inner


def test_charts_fit_a_telephone_and_their_names_with_them(browser):
    metrics = dict(width=390, height=844, deviceScaleFactor=1, mobile=True)
    browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', metrics)
    try:
        script = "return [...document.querySelectorAll('.chart')].map(c => [c.clientWidth, c.scrollWidth])"
        assert all(0 < inner <= 390 and content <= inner for inner, content in browser.execute_script(script))
        script = 'return [innerWidth, document.documentElement.scrollWidth]'
        assert browser.execute_script(script) == [390, 390]
    finally:
        browser.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})


def test_the_numbers_of_a_chart_open(browser):
    summary = browser.find_element(By.CSS_SELECTOR, '#oversmoothing summary')
    table = browser.find_element(By.CSS_SELECTOR, '#oversmoothing details table')
    assert not table.is_displayed()
    browser.execute_script('arguments[0].scrollIntoView({behavior: "instant"})', summary)
    summary.click()
    assert table.is_displayed() and 'model_0' in table.text


def test_it_prints_in_light_without_what_a_hand_needs(browser):
    browser.find_element(By.ID, 'theme').click()
    browser.execute_cdp_cmd('Emulation.setEmulatedMedia', {'media': 'print'})
    try:
        assert background(browser) == 'rgb(255, 255, 255)'
        for name in ('nav', '#theme', 'details'):
            assert not browser.find_element(By.CSS_SELECTOR, name).is_displayed()
    finally:
        browser.execute_cdp_cmd('Emulation.setEmulatedMedia', {'media': ''})
    made = browser.execute_cdp_cmd('Page.printToPDF', {'preferCSSPageSize': True})
    pdf = base64.b64decode(made['data'])
    assert pdf.startswith(b'%PDF') and 1 < pdf.count(b'/Type /Page\n') + pdf.count(b'/Type /Page ') < 15
