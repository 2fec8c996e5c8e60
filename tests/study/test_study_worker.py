"""Workers compute every cell once, also after interruptions."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from studies import STUDY, Executor, value_after, write_study

from vitzoo.errors import UserError
from vitzoo.study import worker as worker_module
from vitzoo.study.claim import Claim, is_claimed
from vitzoo.study.command import run_study
from vitzoo.study.plan import Study, read_study
from vitzoo.study.record import read_cell_file
from vitzoo.study.results import collect
from vitzoo.study.status import CellState, describe_cells, find_state, print_status
from vitzoo.study.tables import count_finished, format_markdown
from vitzoo.study.worker import Worker, run_process
from vitzoo.train.lock import LOCK_FILE, STALE_SECONDS, identify_process
from vitzoo.train.recipe import make_recipe, save_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(worker_module, '_WAIT_SECONDS', 0.01)
    monkeypatch.setattr(worker_module, '_POLL_SECONDS', 0.01)


@pytest.fixture
def study(tmp_path) -> Study:
    return read_study(write_study(tmp_path))


@pytest.fixture
def dead_process() -> dict:
    """The identity of a process that has ended."""
    with subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE) as child:
        owner = identify_process(psutil.Process(child.pid))
        child.kill()
    return owner


def states(study: Study) -> list[str]:
    return [find_state(cell).value for cell in study.cells]


def steps(executor: Executor) -> list[tuple[str, str]]:
    """Folder, and command or evaluation, of each step that was computed."""
    found = []
    for command in executor.commands:
        module = next(word for word in command if word.startswith('vitzoo.'))
        is_evaluation = module == 'vitzoo.validate'
        flag = '--results-file' if is_evaluation else '--output'
        found.append((value_after(command, flag), module))
    return found


def test_every_step_of_every_cell_is_computed_once(study):
    executor = Executor()
    Worker(study, execute=executor).run()
    assert set(states(study)) == {'finished'}
    assert len(steps(executor)) == len(set(steps(executor))) == 3 * len(study.cells)
    Worker(study, execute=executor).run()
    assert len(executor.commands) == 3 * len(study.cells)


def test_the_commands_are_those_that_a_user_would_run(study):
    executor = Executor()
    Worker(study, launch=['accelerate', 'launch'], execute=executor).run()
    cell = study.cells[3]
    assert executor.commands[0][:4] == ['accelerate', 'launch', '-m', 'vitzoo.train']
    transfer = next(command for command in executor.commands if 'vitzoo.transfer' in command)
    options = str(cell.folder / 'options.yaml')
    assert transfer[3:] == [
        *('vitzoo.transfer', str(cell.teacher.folder), '--config', options, '--output', str(cell.folder), '--resume')
    ]
    assert yaml.safe_load(Path(options).read_text()) == dict(data_dir='sample', steps=2, mixer='ls', seed=0)
    assert cell.record.finished['transfer']['command'].startswith(f'vitzoo transfer {cell.teacher.folder} --config')


@pytest.mark.parametrize(
    ('launch', 'cores', 'is_known'),
    [([sys.executable], 8, True), (['accelerate', 'launch'], 8, False), (['accelerate', 'launch'], None, True)],
)
def test_the_threads_of_a_worker_are_not_recorded_for_processes_of_a_launcher(
    study, monkeypatch, launch, cores, is_known
):
    place = dict(measured_on='a machine', load=1.0, cores=cores)
    monkeypatch.setattr(worker_module, 'describe_place', lambda device, amp_dtype: place)
    Worker(study, launch=launch, execute=Executor()).run()
    assert study.cells[0].record.finished['clean']['place'] == (place if is_known else {})


def test_the_device_of_an_evaluation_is_needed_only_where_cells_are_computed(tmp_path):
    # no machine has it
    path = write_study(tmp_path, seeds=[0], evaluations=dict(clean=dict(device='cuda:99')))
    study, executor = read_study(path), Executor()
    run_study(['status', path])
    with pytest.raises(UserError, match="evaluations.clean: .*cannot use the device 'cuda:99'"):
        Worker(study, execute=executor).run()
    assert executor.commands == []
    Worker(study, launch=['srun', 'python'], execute=executor).run()
    assert set(states(study)) == {'finished'}
    run_study(['report', path])


def test_a_failed_cell_is_reported_and_only_stops_those_that_need_it(study, tmp_path, capsys):
    Worker(
        study, execute=Executor(lambda command: 2 if 'teacher/vit_tiny_patch16_224/seed-1' in command[-3] else None)
    ).run()
    by_state = {state: [c.name for c in study.cells if find_state(c) is state] for state in CellState}
    assert by_state[CellState.FAILED] == ['teacher/vit_tiny_patch16_224/seed-1']
    assert by_state[CellState.WAITING] == [f'converted/vit_tiny_patch16_224_to_{m}/seed-1' for m in ('ls', 'performer')]
    assert len(by_state[CellState.FINISHED]) == 12
    assert 'train failed with exit code 2: the disk is full' in capsys.readouterr().out
    # not tried again, but for --retry
    with pytest.raises(UserError, match='1 of 15 cells failed, the first is teacher/.* with --retry'):
        run_study(['run', str(tmp_path / 'study.yaml')])


def test_a_failure_behind_a_launcher_is_told_by_its_own_sentence(tmp_path):
    study = read_study(write_study(tmp_path, seeds=[0], ways=dict(scratch=STUDY['ways']['scratch'])))

    def fail(command, log, claim, should_stop):
        with log.open('a') as file:
            print('$ accelerate launch', file=file)
            # as it is written by the processes, and then by accelerate
            for line in ('a note', error, 'vitzoo: error: process 1 ends', 'Traceback:', 'CalledProcessError: 2'):
                print(line, file=file)
        return 1

    for error in ('vitzoo: error: no such folder', 'vitzoo: error: the disk is full'):
        for cell in study.cells:
            cell.record.forget_failure()
        Worker(study, launch=['accelerate', 'launch'], execute=fail).run()
        assert {cell.record.failure['message'] for cell in study.cells} == {error.removeprefix('vitzoo: error: ')}


def test_the_message_of_a_command_that_was_killed_at_its_start_is_not_the_command(tmp_path):
    study = read_study(write_study(tmp_path, seeds=[0], ways=dict(scratch=STUDY['ways']['scratch'])))

    def kill(command, log, claim, should_stop):
        log.write_text('$ python -m vitzoo.train\nvitzoo: error: of an earlier attempt\n$ python -m vitzoo.train\n')
        return -9

    Worker(study, execute=kill).run()
    assert {cell.record.failure['message'] for cell in study.cells} == {'no output'}


def test_retry_computes_failed_cells_again(tmp_path, monkeypatch):
    path = write_study(tmp_path)
    study = read_study(path)
    for cell in study.cells:
        cell.record.fail('train', 1, 'no memory')
    monkeypatch.setattr(worker_module, 'run_process', Executor())
    run_study(['run', path, '--retry'])
    assert set(states(study)) == {'finished'}


def test_only_chosen_cells_and_their_teachers_are_computed(tmp_path, monkeypatch, capsys):
    path = write_study(tmp_path)
    executor = Executor()
    monkeypatch.setattr(worker_module, 'run_process', executor)
    run_study(['run', path, '--cells', 'converted/*_to_ls/seed-1'])
    teacher, student = 'teacher/vit_tiny_patch16_224/seed-1', 'converted/vit_tiny_patch16_224_to_ls/seed-1'
    cells = read_study(path).cells
    assert {cell.name for cell in cells if find_state(cell) is CellState.FINISHED} == {teacher, student}
    assert '2 cells: 2 finished' in capsys.readouterr().out
    with pytest.raises(
        UserError, match=r"no cell matches 'converted/\*_to_lss/\*'; their names are <way>/<model>/seed-"
    ):
        run_study(['run', path, '--cells', 'converted/*', 'converted/*_to_lss/*'])
    # of another process's cells, only those that failed here are an error
    cells[0].record.fail('train', 1, 'no memory')
    run_study(['run', path, '--cells', student])


def test_a_new_evaluation_is_computed_for_finished_cells(tmp_path):
    Worker(read_study(write_study(tmp_path)), execute=Executor()).run()
    evaluations = {**STUDY['evaluations'], 'small': dict(img_size=96)}
    executor = Executor()
    Worker(read_study(write_study(tmp_path, evaluations=evaluations)), execute=executor).run()
    assert len(executor.commands) == 15 and all('--img-size' in command for command in executor.commands)


def test_finished_cells_with_other_options_are_refused(tmp_path):
    Worker(read_study(write_study(tmp_path)), execute=Executor()).run()
    ways = {**STUDY['ways'], 'scratch': dict(train=dict(epochs=4, lr=1e-3))}
    for action in ('run', 'status', 'report'):
        with pytest.raises(UserError, match='seed-0. was computed with train epochs = 3, not 4; undo the change'):
            run_study([action, write_study(tmp_path, ways=ways)])
    # a key that does not change the weights
    ways = {**STUDY['ways'], 'scratch': dict(train=dict(epochs=3, lr=1e-3, workers=7))}
    run_study(['status', write_study(tmp_path, ways=ways)])


def without_data(study: Study) -> None:
    """Remove the data of the trainings from the files of the cells, as earlier versions wrote them."""
    for cell in study.cells:
        found = json.loads(cell.record.path.read_text())
        finished = found['finished'][cell.command]
        names = ('teacher data_dir',) if cell.teacher else ('data_dir',)
        finished['settings'] = {key: value for key, value in finished['settings'].items() if key not in names}
        cell.record.path.write_text(json.dumps(found))


def test_a_training_on_other_data_is_refused(tmp_path):
    study = read_study(write_study(tmp_path, seeds=[0]))
    Worker(study, execute=Executor()).run()
    ways = {**STUDY['ways'], 'scratch': dict(train=dict(epochs=3, lr=1e-3, data_dir='other'))}
    path = write_study(tmp_path, seeds=[0], ways=ways)
    with pytest.raises(UserError, match="was computed with train data_dir = 'sample', not 'other'"):
        run_study(['status', path])
    # computed before the data was recorded
    without_data(study)
    run_study(['status', path])


def test_a_student_is_refused_if_its_teacher_has_other_data(tmp_path):
    study = read_study(write_study(tmp_path, seeds=[0]))
    Worker(study, execute=Executor()).run()
    ways = {**STUDY['ways'], 'teacher': dict(STUDY['ways']['teacher'], train=dict(epochs=3, data_dir='other'))}
    path = write_study(tmp_path, seeds=[0], ways=ways)
    shutil.rmtree(tmp_path / 'out' / 'teacher')
    with pytest.raises(UserError, match="was computed with transfer teacher data_dir = 'sample', not 'other'"):
        run_study(['status', path])


def test_a_number_that_became_text_is_told_from_it(tmp_path):
    Worker(read_study(write_study(tmp_path, seeds=[0])), execute=Executor()).run()
    ways = {**STUDY['ways'], 'scratch': dict(train=dict(epochs='3', lr=1e-3))}
    with pytest.raises(UserError, match="train epochs = 3, not '3'"):
        run_study(['status', write_study(tmp_path, seeds=[0], ways=ways)])


def test_a_training_continues_only_with_the_options_that_it_started_with(tmp_path):
    def stop(command, *args):
        (Path(value_after(command, '--output')) / 'checkpoints').mkdir(exist_ok=True)
        return -15

    Worker(read_study(write_study(tmp_path)), execute=stop).run()
    ways = {**STUDY['ways'], 'scratch': dict(train=dict(epochs=3, lr=2e-3))}
    with pytest.raises(UserError, match='was computed with train lr = 0.001, not 0.002'):
        run_study(['run', write_study(tmp_path, ways=ways)])


def test_a_training_whose_cell_json_was_removed_continues_only_with_its_recipe(tmp_path):
    path = write_study(tmp_path, seeds=[0], ways=dict(scratch=STUDY['ways']['scratch']))
    cell = read_study(path).cells[0]
    (cell.folder / 'checkpoints').mkdir(parents=True)
    # numbers that YAML has as text are those of the recipe
    save_recipe(make_recipe(cell.options | dict(lr='1e-3', workers=3)), cell.folder / 'recipe.yaml', [])
    run_study(['status', path])
    ways = dict(scratch=dict(train=dict(epochs=3, lr='2e-3')))
    with pytest.raises(UserError, match="was computed with train lr = 0.001, not '2e-3'; undo the change"):
        run_study(['status', write_study(tmp_path, seeds=[0], ways=ways)])


@pytest.mark.parametrize('text', ['[]', '[[1]]', '[{"model": "a", "top1": "x"}]', '{', '{"a": 1}', '[1]'])
def test_damaged_files_of_a_cell_are_named(tmp_path, text):
    path = write_study(tmp_path, seeds=[0], ways=dict(scratch=STUDY['ways']['scratch']))
    study = read_study(path)
    Worker(study, execute=Executor()).run()
    record = study.cells[0].record
    for file in record.results_file('clean'), record.path:
        file.write_text(text)
        with pytest.raises(UserError, match=f"cannot read '{file}': .*; remove '?.* to compute the cell again"):
            run_study(['status', path])


def test_a_cell_json_without_a_key_is_described(tmp_path):
    (tmp_path / 'cell.json').write_text('{"started": {}}')
    with pytest.raises(UserError, match="cell.json': it has no 'finished'; remove it"):
        read_cell_file(tmp_path / 'cell.json')


def test_steps_of_earlier_versions_have_no_machine(tmp_path):
    path = write_study(tmp_path, seeds=[0], ways=dict(scratch=STUDY['ways']['scratch']))
    study = read_study(path)
    Worker(study, execute=Executor()).run()
    for cell in study.cells:
        found = json.loads(cell.record.path.read_text())
        for step in found['finished'].values():
            del step['place']
        cell.record.path.write_text(json.dumps(found))
    run_study(['status', path])


class Killed(BaseException):
    """The end of a worker by SIGKILL."""


def test_a_study_that_is_killed_ten_times_ends_with_the_same_table(tmp_path, dead_process, monkeypatch):
    for name in ('killed', 'undisturbed'):
        (tmp_path / name).mkdir()
    studies = {name: read_study(write_study(tmp_path / name)) for name in ('killed', 'undisturbed')}
    Worker(studies['undisturbed'], execute=Executor()).run()

    generator, times, is_killed = random.Random(0), 0, False
    executor, release = Executor(), Claim.release

    def kill_sometimes(command, *args):
        nonlocal is_killed
        when = generator.choice(['before', 'after', 'never', 'never']) if times < 10 else 'never'
        if when != 'before':
            executor(command, *args)
        is_killed = when != 'never'
        if is_killed:
            raise Killed
        return 0

    def leave(claim):
        # a dead worker leaves its lock
        if is_killed:
            claim.lock.path.write_text(json.dumps(dict(dead_process, token='dead')))
        release(claim)

    monkeypatch.setattr(Claim, 'release', leave)
    while set(states(studies['killed'])) != {'finished'}:
        is_killed = False
        try:
            Worker(studies['killed'], execute=kill_sometimes).run()
        except Killed:
            times += 1
    assert times == 10
    tables = [format_markdown(study, collect(study)) for study in studies.values()]
    assert tables[0] == tables[1]


def test_two_workers_compute_every_cell_once(study):
    executor = Executor(lambda command: time.sleep(0.002))
    workers = [threading.Thread(target=Worker(study, execute=executor).run) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert set(states(study)) == {'finished'}
    assert sorted(steps(executor)) == sorted(set(steps(executor)))
    assert len(executor.commands) == 45


def test_a_worker_waits_for_the_process_of_one_that_was_killed(study, dead_process):
    cell = study.cells[0]
    claim = Claim(cell.folder)
    assert claim.acquire()
    with subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE) as child:
        claim.watch(child.pid)
        claim.lock.path.write_text(json.dumps(dict(dead_process, token='dead')))
        assert not Claim(cell.folder).acquire() and find_state(cell) is CellState.RUNNING
        child.kill()
    other = Claim(cell.folder)
    assert find_state(cell) is CellState.FREE and other.acquire()
    assert not claim.acquire()
    other.release()
    assert not is_claimed(cell.folder)


# of the claim, and of the training, which goes on if only its worker was killed
@pytest.mark.parametrize('locked', ['.claim', '.'])
@pytest.mark.parametrize(('age', 'is_held'), [(0, True), (STALE_SECONDS + 5, False)])
def test_the_cell_of_a_worker_elsewhere_is_free_after_a_minute_without_a_heartbeat(study, locked, age, is_held):
    folder = study.cells[0].folder / locked
    folder.mkdir(parents=True)
    lock = folder / LOCK_FILE
    lock.write_text(json.dumps(dict(token='theirs', host='elsewhere', pid=1, started=0.0)))
    os.utime(lock, (time.time() - age,) * 2)
    assert is_claimed(study.cells[0].folder) == is_held
    claim = Claim(study.cells[0].folder)
    assert claim.acquire() != is_held
    claim.release()


@pytest.mark.parametrize('code', [0, -15, 143])
def test_a_step_that_was_stopped_is_neither_finished_nor_failed(study, code):
    # a training that gets SIGTERM ends with 0, without its model
    seen = []

    def stop(command, log, claim, should_stop):
        seen.append(command)
        return code

    Worker(study, execute=stop).run()
    assert set(states(study)) == {'to do', 'waiting for a teacher'}
    assert len(seen) == 9
    executor = Executor()
    Worker(study, execute=executor).run()
    assert len(executor.commands) == 45


def test_a_study_with_a_step_that_was_stopped_ends_with_an_error_unless_it_was_stopped_itself(tmp_path, monkeypatch):
    def stop(command):
        return -15 if any('teacher/' in word for word in command) else None

    path = write_study(tmp_path, seeds=[0])
    monkeypatch.setattr(worker_module, 'run_process', Executor(stop))
    message = 'stopped from outside; cells left to do: 3 of 5, the first is teacher/.*; run the study again to continue'
    with pytest.raises(UserError, match=message):
        run_study(['run', path])
    monkeypatch.setattr(worker_module, 'run_process', Executor(lambda command: signal.raise_signal(signal.SIGTERM)))
    run_study(['run', path])
    assert 'to do' in states(read_study(path))


def test_a_worker_that_should_stop_stops(study):
    executor = Executor()
    Worker(study, should_stop=lambda: len(executor.commands) >= 2, execute=executor).run()
    assert len(executor.commands) == 2
    assert 'to do' in states(study)


def test_the_time_left_follows_from_finished_cells(study):
    assert describe_cells(study) == '15 cells: 9 to do, 6 waiting for a teacher'
    for step in ('train', 'clean', 'corrupt'):
        study.cells[0].record.finish(step, 60.0, 'vitzoo')
    assert describe_cells(study).endswith('about 42 min left')


def test_the_status_takes_a_cell_that_another_worker_finishes_meanwhile(study, monkeypatch, capsys):
    cell = study.cells[0]

    def finish_after(*args):
        state = find_state(*args)
        if state is CellState.RUNNING:
            for step in cell.record.missing:
                cell.record.finish(step, 1.0, 'vitzoo')
        return state

    claim = Claim(cell.folder)
    assert claim.acquire()
    monkeypatch.setattr('vitzoo.study.status.describe_cells', lambda study: 'states')
    monkeypatch.setattr('vitzoo.study.status.find_state', finish_after)
    print_status(study)
    claim.release()
    assert 'is running' not in capsys.readouterr().out


def test_a_single_cell_is_not_several(tmp_path):
    ways = dict(scratch=dict(train={}, models='deit_softmax_nano'))
    study = read_study(write_study(tmp_path, seeds=[0], ways=ways))
    assert (describe_cells(study), count_finished(study)) == ('1 cell: 1 to do', '0 of 1 cell is finished')


def test_a_process_writes_to_the_log_and_is_ended_on_request(study, tmp_path):
    cell = study.cells[0]
    claim = Claim(cell.folder)
    assert claim.acquire()
    log = tmp_path / 'log'
    assert run_process([sys.executable, '-c', 'print("a"); raise SystemExit(3)'], log, claim, lambda: False) == 3
    assert log.read_text().splitlines()[-1] == 'a'
    sleep = [sys.executable, '-c', 'import time; time.sleep(60)']
    assert run_process(sleep, log, claim, lambda: True) == -15
    with pytest.raises(UserError, match="cannot start 'no-such-launcher'.*correct --launch"):
        run_process(['no-such-launcher'], log, claim, lambda: False)
    claim.release()


@pytest.mark.slow
def test_a_study_trains_converts_evaluates_and_reports(tmp_path):
    size = dict(img_size=32, model_kwargs=dict(depth=2, embed_dim=24, num_heads=2, patch_size=8))
    quick = dict(epochs=1, workers=0, batch_size=500, warmup_epochs=0, **size)
    ways = dict(
        scratch=dict(train=quick, models=['deit_softmax_nano', 'deit_ls_nano']),
        teacher=dict(train=quick, models='vit_tiny_patch16_224'),
        converted=dict(
            transfer=dict(
                steps=2,
                network_steps=2,
                evals=1,
                eval_images=8,
                batch_size=8,
                workers=0,
                no_random_control=True,
                sizes=[32],
            ),
            teacher='vit_tiny_patch16_224',
            teacher_way='teacher',
            mixers='ls',
        ),
    )
    evaluations = dict(clean=dict(workers=0), larger=dict(workers=0, img_size=48))
    path = write_study(tmp_path, ways=ways, evaluations=evaluations, seeds=[0])
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, '-m', 'vitzoo', 'study', 'run', path]
    # killed while it trains, so that its training goes on alone
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as child:
        deadline = time.monotonic() + 120
        while not list(tmp_path.rglob('process.json')) and time.monotonic() < deadline:
            time.sleep(0.1)
        child.kill()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run_study(['report', path])
    report = tmp_path / 'out' / 'report'
    assert {'table.md', 'table.tex', 'table.csv', 'cells.csv', 'index.html'} <= {file.name for file in report.iterdir()}
    table = (report / 'table.md').read_text()
    assert '4 of 4 cells are finished' in table and 'top-1 %, larger' in table
    assert 'better' not in table.split('\n\n')[1]


def test_a_student_is_refused_if_its_teacher_has_another_recipe(tmp_path):
    study = read_study(write_study(tmp_path, seeds=[0]))
    Worker(study, execute=Executor()).run()
    ways = {**STUDY['ways'], 'teacher': dict(train=dict(epochs=30), models='vit_tiny_patch16_224')}
    path = write_study(tmp_path, seeds=[0], ways=ways)
    shutil.rmtree(tmp_path / 'out' / 'teacher')
    with pytest.raises(UserError, match=r'_to_ls/seed-0. was computed with transfer teacher epochs = 3, not 30'):
        run_study(['status', path])
    # a student that was finished before the recipe was recorded
    for cell in study.cells:
        found = json.loads(cell.record.path.read_text()) if cell.teacher else dict(finished={})
        if 'transfer' in found['finished']:
            settings = found['finished']['transfer']['settings']
            found['finished']['transfer']['settings'] = {k: v for k, v in settings.items() if ' ' not in k}
            cell.record.path.write_text(json.dumps(found))
    run_study(['status', path])


def test_a_cell_is_finished_if_its_failed_evaluation_was_removed(tmp_path):
    evaluations = dict(clean={}, larger=dict(img_size=160))
    execute = Executor(lambda command: 2 if '--img-size' in command else None)
    Worker(read_study(write_study(tmp_path, seeds=[0], evaluations=evaluations)), execute=execute).run()
    run_study(['run', write_study(tmp_path, seeds=[0], evaluations=dict(clean={}))])


def test_a_cell_goes_on_if_its_failed_evaluation_was_removed(tmp_path):
    evaluations = dict(larger=dict(img_size=160), clean={})
    execute = Executor(lambda command: 2 if '--img-size' in command else None)
    Worker(read_study(write_study(tmp_path, seeds=[0], evaluations=evaluations)), execute=execute).run()
    study = read_study(write_study(tmp_path, seeds=[0], evaluations=dict(clean={})))
    Worker(study, execute=execute).run()
    assert set(states(study)) == {'finished'}


def test_a_changed_evaluation_is_refused_without_the_advice_to_remove_its_model(tmp_path):
    Worker(read_study(write_study(tmp_path, seeds=[0])), execute=Executor()).run()
    path = write_study(tmp_path, seeds=[0], evaluations=dict(clean=dict(batch_size=32)))
    with pytest.raises(UserError, match='clean batch_size = None, not 32; undo the change or rename the evaluation$'):
        run_study(['status', path])


def test_a_transfer_that_was_stopped_in_its_matching_continues_only_with_its_options(tmp_path):
    def stop(command):
        if 'vitzoo.transfer' in command:
            (Path(value_after(command, '--output')) / 'transfer.json').write_text('{}')
            return -15

    Worker(read_study(write_study(tmp_path, seeds=[0])), execute=Executor(stop)).run()
    ways = {**STUDY['ways'], 'converted': {**STUDY['ways']['converted'], 'transfer': dict(steps=5)}}
    with pytest.raises(UserError, match='was computed with transfer steps = 2, not 5'):
        run_study(['status', write_study(tmp_path, seeds=[0], ways=ways)])


@pytest.mark.parametrize('end', ['of the step', 'of the worker by Ctrl-C'])
def test_the_time_of_a_step_is_that_of_all_its_attempts(tmp_path, end):
    ways = dict(scratch=dict(train={}, models='deit_ls_nano'))
    path = write_study(tmp_path, seeds=[0], ways=ways, baseline='deit_ls_nano')

    def stop(command):
        time.sleep(0.2)
        if end == 'of the worker by Ctrl-C':
            raise KeyboardInterrupt
        return -15

    for _ in range(2):
        with suppress(KeyboardInterrupt):
            Worker(read_study(path), execute=Executor(stop)).run()
    study = read_study(path)
    Worker(study, execute=Executor()).run()
    assert all(cell.record.finished['train']['seconds'] >= 0.4 for cell in study.cells)
