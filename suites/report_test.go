package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// resultsOf makes results of lines such as "TestX passed".
func resultsOf(lines ...string) *results {
	r := newResults()
	for _, line := range lines {
		name, o, _ := strings.Cut(line, " ")
		r.tests[name] = outcome(o)
	}
	return r
}

func TestJudge(t *testing.T) {
	for _, tt := range []struct {
		name         string
		tcp, rdmanet []string
		known        []known
		alone        []string // tests that passed alone
		device       string
		fault        string // of the only one, "" for none
	}{
		{name: "all pass", tcp: []string{"A passed"}, rdmanet: []string{"A passed"}},
		{name: "skipped over both", tcp: []string{"A passed", "B skipped"}, rdmanet: []string{"A passed", "B skipped"}},
		{name: "skipped over TCP only", tcp: []string{"A passed", "B skipped"}, rdmanet: []string{"A passed", "B passed"}},
		{name: "skipped", tcp: []string{"A passed", "B passed"}, rdmanet: []string{"A passed", "B skipped"}, fault: "B passed over TCP, is skipped over rdmanet"},
		{name: "failed", tcp: []string{"A passed", "B passed"}, rdmanet: []string{"A passed", "B failed"}, fault: "B passed over TCP, failed over rdmanet"},
		{name: "hangs", tcp: []string{"A passed", "B passed"}, rdmanet: []string{"A passed", "B unfinished"}, fault: "B passed over TCP, does not finish over rdmanet"},
		{name: "not run", tcp: []string{"A passed", "B passed"}, rdmanet: []string{"A passed"}, fault: "1 tests were not run over rdmanet"},
		{name: "fails over both", tcp: []string{"A passed", "B failed"}, rdmanet: []string{"A passed", "B failed"}, fault: "B failed over TCP, failed over rdmanet, and is not listed"},
		{name: "fails over TCP", tcp: []string{"A passed", "B failed"}, rdmanet: []string{"A passed", "B passed"}, fault: "B failed over TCP, passed over rdmanet, and is not listed"},
		{
			name: "listed", tcp: []string{"A passed", "B failed"}, rdmanet: []string{"A passed", "B failed"},
			known: []known{{test: "B"}},
		},
		{
			name: "listed, with a parent", tcp: []string{"A passed", "B failed", "B/c failed", "B/d passed"},
			rdmanet: []string{"A passed", "B failed", "B/c failed", "B/d passed"}, known: []known{{test: "B/c"}},
		},
		{
			name: "a parent whose other child fails", tcp: []string{"A passed", "B failed", "B/c failed", "B/d passed"},
			rdmanet: []string{"A passed", "B failed", "B/c failed", "B/d failed"}, known: []known{{test: "B/c"}},
			fault: "B/d passed over TCP, failed over rdmanet",
		},
		{
			name: "listed as TCP's, and passes there", tcp: []string{"A passed", "B passed"}, rdmanet: []string{"A passed", "B failed"},
			known: []known{{test: "B"}}, fault: "B is listed as one that does not pass over TCP, and does",
		},
		{
			name: "listed and passes", tcp: []string{"A passed"}, rdmanet: []string{"A passed"},
			known: []known{{test: "A"}}, fault: "A is listed, and passes over both",
		},
		{
			name: "listed as flaky and passes", tcp: []string{"A passed"}, rdmanet: []string{"A passed"},
			known: []known{{test: "A", flaky: true}},
		},
		{
			name: "flaky over TCP", tcp: []string{"A passed", "B failed"}, rdmanet: []string{"A passed", "B failed"},
			known: []known{{test: "B", flaky: true}},
		},
		{
			name: "flaky over rdmanet", tcp: []string{"A passed", "B passed"}, rdmanet: []string{"A passed", "B failed"},
			known: []known{{test: "B", flaky: true}}, alone: []string{"B"},
		},
		{
			name: "listed as flaky, and never passes over rdmanet", tcp: []string{"A passed", "B passed"}, rdmanet: []string{"A passed", "B failed"},
			known: []known{{test: "B", flaky: true}}, fault: "B is listed as flaky, and passed over TCP, but over rdmanet not once",
		},
		{
			name: "listed and not there", tcp: []string{"A passed"}, rdmanet: []string{"A passed"},
			known: []known{{test: "B"}}, fault: "B is listed, and was not run",
		},
		{
			name: "differs", tcp: []string{"A passed", "B passed"}, rdmanet: []string{"A passed", "B failed"},
			known: []known{{test: "B", cause: differs}},
		},
		{
			name: "listed for guests, on the host", tcp: []string{"A passed", "B failed"}, rdmanet: []string{"A passed", "B failed"},
			known: []known{{test: "B", guest: true}}, fault: "B failed over TCP",
		},
		{
			name: "listed for guests, in one", tcp: []string{"A passed", "B failed"}, rdmanet: []string{"A passed", "B failed"},
			known: []known{{test: "B", guest: true}}, device: "rxe",
		},
		{name: "no tests over rdmanet", tcp: []string{"A skipped"}, rdmanet: []string{"A skipped", "B passed"}, fault: "no test passed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			device := tt.device
			if device == "" {
				device = "iwarp"
			}
			r := report{suite: suite{known: tt.known}, tcp: resultsOf(tt.tcp...), rdmanet: resultsOf(tt.rdmanet...), alone: make(map[string]bool)}
			for _, name := range tt.alone {
				require.Contains(t, r.doubtful(device != "iwarp"), name)
				r.alone[name] = true
			}
			r.rdmanet.connections[device] = 1
			r.judge(device)
			if tt.fault == "" {
				require.Empty(t, r.faults)
				return
			}
			var all []string
			for _, f := range r.faults {
				all = append(all, f.text)
			}
			require.Contains(t, strings.Join(all, "\n"), tt.fault)
		})
	}
}

func TestJudgeConnections(t *testing.T) {
	for device, fault := range map[string]string{
		"":      "no connection over rdmanet was made",
		"iwarp": "connections were made over iwarp",
		"rxe0":  "",
	} {
		r := report{tcp: resultsOf("A passed"), rdmanet: resultsOf("A passed")}
		if device != "" {
			r.rdmanet.connections[device] = 3
		}
		r.judge("rxe")
		if fault == "" {
			require.Empty(t, r.faults)
		} else {
			require.Len(t, r.faults, 1)
			require.Contains(t, r.faults[0].text, fault)
		}
	}
}

// flakyEnv is a file to which TestFlaky adds a line each time it is run.
const flakyEnv = "RDMANET_TEST_FLAKY"

// TestFlaky is what TestPassesAlone runs: a test whose part passes the second time.
func TestFlaky(t *testing.T) {
	file := os.Getenv(flakyEnv)
	if file == "" {
		t.Skip("it is for TestPassesAlone")
	}
	runs, _ := os.ReadFile(file)
	require.NoError(t, os.WriteFile(file, append(runs, t.Name()+"\n"...), 0o666))
	t.Run("at (times)", func(t *testing.T) { require.NotEmpty(t, runs) })
	t.Run("never", func(t *testing.T) { t.FailNow() })
}

func TestPassesAlone(t *testing.T) {
	bin, err := os.Executable()
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "runs")
	t.Setenv(flakyEnv, file)
	var executions []execution
	for _, pkg := range []string{".", "sub"} {
		tree := &tree{dir: t.TempDir(), module: t.TempDir()}
		require.NoError(t, os.Mkdir(filepath.Join(tree.module, "sub"), 0o777))
		executions = append(executions, execution{suite: suite{timeout: time.Minute}, tree: tree, pkg: pkg, bin: bin, over: overRDMANet, device: "iwarp"})
	}
	for _, tt := range []struct {
		test string
		ok   bool
		runs int
	}{
		{"TestFlaky/at_(times)", true, 2},
		{"sub.TestFlaky/at_(times)", true, 2},
		{"sub.TestFlaky/never", false, aloneTimes},
		{"sub.TestFlak", false, 0},
	} {
		require.NoError(t, os.WriteFile(file, nil, 0o666))
		ok, err := passesAlone(executions, tt.test)
		require.NoError(t, err)
		require.Equal(t, tt.ok, ok, tt.test)
		runs, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, tt.runs, strings.Count(string(runs), "\n"), tt.test)
	}
}

// TestParse goes through test2json, with what a test binary prints.
func TestParse(t *testing.T) {
	const mark = "\x16"
	for _, tt := range []struct {
		name, output string
		exit         error
		want         map[string]outcome
		broken       bool
	}{
		{
			name: "ends well",
			output: mark + "=== RUN   TestA\nhello\n" + mark + "--- PASS: TestA (0.00s)\n" +
				mark + "=== RUN   TestB\n" + mark + "--- SKIP: TestB (0.00s)\n" + mark + "PASS\n",
			want: map[string]outcome{"TestA": passed, "TestB": skipped},
		},
		{
			name: "a subtest fails",
			output: mark + "=== RUN   TestA\n" + mark + "=== RUN   TestA/b\n" + mark + "--- FAIL: TestA (0.00s)\n" +
				mark + "    --- FAIL: TestA/b (0.00s)\n" + mark + "FAIL\n",
			exit: errors.New("exit status 1"),
			want: map[string]outcome{"TestA": failed, "TestA/b": failed},
		},
		{
			name:   "the binary dies in a test",
			output: mark + "=== RUN   TestA\npanic: no\n",
			exit:   errors.New("exit status 2"),
			want:   map[string]outcome{"TestA": unfinished},
		},
		{
			name:   "the binary fails after the tests",
			output: mark + "=== RUN   TestA\n" + mark + "--- PASS: TestA (0.00s)\n" + mark + "PASS\nleak\n",
			exit:   errors.New("exit status 1"),
			want:   map[string]outcome{"TestA": passed},
			broken: true,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newResults()
			require.NoError(t, r.parse(".", strings.NewReader(tt.output)))
			r.exit(".", tt.exit)
			require.Equal(t, tt.broken, len(r.broken) == 1, "%v", r.broken)
			for name, want := range tt.want {
				got := r.of(name)
				if want == unfinished && got == failed {
					continue // as newer versions of test2json have it
				}
				require.Equal(t, want, got, name)
			}
			require.Len(t, r.tests, len(tt.want))
		})
	}
}
