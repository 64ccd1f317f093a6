"""Every key of the dashboard in one table: bindings, help screen, palette and docs are made from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """keys: as Textual names them, comma-separated. show: as people write it. action: of the app ("" = only described)."""

    keys: str
    show: str
    action: str
    text: str
    group: str
    palette: bool = True


KEYS = (
    Key("1", "1", "show('overview')", "Overview", "Screens"),
    Key("2", "2", "show('gpu')", "GPUs and processes", "Screens"),
    Key("3", "3", "show('jobs')", "Jobs and log", "Screens"),
    Key("4", "4", "show('board')", "Task board", "Screens"),
    Key("5", "5", "show('bench')", "Benchmarks", "Screens"),
    Key("6", "6", "show('server')", "Server: phases, charts, diagnosis", "Screens"),
    Key("7", "7", "show('tune')", "Tuning: trials, chart, the best settings so far", "Screens"),
    Key("8", "8", "show('pipeline')", "Pipeline: steps, training, report", "Screens"),
    Key("s", "s", "stage('serve')", "Start a server (choose a profile, see the command)", "Orders"),
    Key("S", "S", "stop_server", "Stop the server (asks first)", "Orders"),
    Key("b", "b", "stage('bench')", "Benchmark the server", "Orders"),
    Key("P", "P", "stage('prepare')", "Prepare the training data", "Orders"),
    Key("x", "x", "stage('extract')", "Extract hidden states", "Orders"),
    Key("t", "t", "stage('train')", "Train the draft model", "Orders"),
    Key("V", "V", "stage('evaluate')", "Evaluate the draft model", "Orders"),
    Key("U", "U", "stage('tune')", "Tune: find the fastest settings (docs/tune.md)", "Orders"),
    Key("A", "A", "stage('pipeline')", "Run the whole pipeline, or up to a step", "Orders"),
    Key("u", "u", "", "Pipeline screen: run up to the selected step (shows the form first)", "Orders", False),
    Key("r", "r", "retry", "Retry the selected job (asks first for a server)", "Orders"),
    Key("d", "d", "stop_job", "Stop the selected job (asks first)", "Orders"),
    Key("slash", "/", "", "Filter the jobs; D removes one that has ended (asks first)", "Orders", False),
    Key("enter", "Enter", "", "Open the selected row (a job's log, a step's log)", "Look"),
    Key("l", "l", "open_log", "The server's log; on the jobs screen the selected job's", "Look"),
    Key("p", "p", "proof", "Jump to the line that proves the diagnosis", "Look"),
    Key("left_square_bracket", "[", "next_server(-1)", "Previous server", "Look"),
    Key("right_square_bracket", "]", "next_server(1)", "Next server", "Look"),
    Key("z", "z", "zoom", "Enlarge the focused panel, and back", "Look"),
    Key("tab", "Tab", "", "Next panel (Shift+Tab: previous)", "Look", False),
    Key("y", "y", "copy", "Copy: the selected row, the log's line, a command (OSC 52)", "Look"),
    Key("c", "c", "gpu_curves", "GPUs over the time of the selected job or benchmark", "Look"),
    Key("i", "i", "links", "Links: the job, task, benchmark rows and GPU curves of the selection", "Look"),
    Key("R", "R", "report", "Report on the server for an issue tracker", "Look"),
    Key("m", "m", "notices", "Messages so far", "Look"),
    Key("o", "o", "", "Sort the GPUs: index, utilisation, memory, power, temperature", "GPUs", False),
    Key("enter", "Enter", "", "One GPU in depth (Left, Right: its neighbours; + and -: the span of its curves)", "GPUs", False),
    Key("space", "Space", "", "Tag a GPU process, for ending several", "GPUs", False),
    Key("o", "o", "", "Processes: order by GPU, memory, SM share, RAM, CPU, age, pid, user", "GPUs", False),
    Key("c", "c", "", "Processes: the curves of the selected one (e there: its environment)", "GPUs", False),
    Key("a", "a", "", "Processes: also the busiest others of this host, and back", "GPUs", False),
    Key("K", "K", "", "End the tagged processes, or the selected one: TERM, INT or KILL (asks first)", "GPUs", False),
    Key("v", "v", "", "Next view of the selected run: settings, sweep, trade-off, the run in full", "Bench", False),
    Key("enter", "Enter", "", "Every request of the run on one time line", "Bench", False),
    Key("B", "B", "", "Measure the others against the selected run", "Bench", False),
    Key("o", "o", "", "Order the runs", "Bench", False),
    Key("slash", "/", "", "Filter the runs", "Bench", False),
    Key("Y", "Y", "", "Copy the table as Markdown", "Bench", False),
    Key("e", "e", "", "Label the run (#word: its tag)", "Bench", False),
    Key("M", "M", "", "Store the run as its workload's baseline, or no longer", "Bench", False),
    Key("D", "D", "", "Remove the run from the store (asks first)", "Bench", False),
    Key("slash", "/", "", "Search (log); n and N: next and previous", "Log", False),
    Key("ampersand", "&", "", "Filter: only matching lines (Esc: all again)", "Log", False),
    Key("e", "e E", "", "Next and previous error", "Log", False),
    Key("f", "f", "", "Follow the end, or hold still", "Log", False),
    Key("w", "w", "", "Wrap long lines; left and right move sideways", "Log", False),
    Key("o", "o", "", "Show or fold the traces of health and metrics polls at the end", "Log", False),
    Key("u", "u", "", "Show the time since the line above", "Log", False),
    Key("left_curly_bracket", "{ }", "", "Previous and next phase of the start (full screen)", "Log", False),
    Key("g", "g G", "", "Begin and end (also Home, End)", "Log", False),
    Key("space", "Space", "", "Next status (asks when other tasks come first)", "Board", False),
    Key("enter", "Enter", "", "Open the task: its job's log, else its details", "Board", False),
    Key("u", "u", "", "Undo the last change of a status", "Board", False),
    Key("a", "a", "", "Add a task", "Board", False),
    Key("e", "e", "", "Edit the task's words; n: its note", "Board", False),
    Key("exclamation_mark", "!", "", "Next priority of the task", "Board", False),
    Key("K", "K J", "", "Move the task up, down", "Board", False),
    Key("v", "v", "", "List, or columns (left and right: the next column)", "Board", False),
    Key("slash", "/", "", "Filter: tasks with these words (Esc: all)", "Board", False),
    Key("f", "f F", "", "Filter by status, by priority", "Board", False),
    Key("question_mark,f1", "?", "help", "This help", "Program"),
    Key("ctrl+p,colon", "^p :", "palette", "Command palette", "Program"),
    Key("T", "T", "themes", "Theme", "Program"),
    Key("ctrl+l", "^l", "redraw", "Draw everything again", "Program"),
    Key("ctrl+z", "^z", "suspend_process", "Suspend; fg in the shell brings it back", "Program"),
    Key("q,ctrl+c", "q", "leave", "Quit; jobs and servers go on", "Program"),
    Key("Q", "Q", "leave_and_stop", "Quit and stop what runs (asks first)", "Program"),
)

TABS = (
    ("1", "Overview", "overview"),
    ("2", "GPUs", "gpu"),
    ("3", "Jobs", "jobs"),
    ("4", "Board", "board"),
    ("5", "Bench", "bench"),
    ("6", "Server", "server"),
    ("7", "Tune", "tune"),
    ("8", "Pipeline", "pipeline"),
)

# Keys that the buttons' stages have by default; a stage's own key is used when it is free.
STAGE_KEYS = {"serve": "s", "bench": "b", "prepare": "P", "extract": "x", "train": "t", "evaluate": "V", "tune": "U", "pipeline": "A"}
