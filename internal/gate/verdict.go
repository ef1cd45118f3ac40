package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/rdmanet/rdmanet/internal/defect"
)

// A verdict is what the events of tests amount to.
type verdict struct {
	Tests int // that were run, without subtests
	Again int // runs of those that had failed before

	// Flaky has a line for each test that failed and then passed.
	Flaky []string

	// Skipped has the reasons for which tests were skipped, and how many there are of each.
	Skipped map[string]int

	// Failure is why the step fails, with output. It is empty if it does not.
	Failure string
}

// add adds what came of other tests.
func (v *verdict) add(w verdict) {
	v.Tests += w.Tests
	v.Again += w.Again
	v.Flaky = append(v.Flaky, w.Flaky...)
	if v.Skipped == nil {
		v.Skipped = make(map[string]int)
	}
	for why, n := range w.Skipped {
		v.Skipped[why] += n
	}
	if v.Failure == "" {
		v.Failure = w.Failure
	}
}

// inexcusable returns what no repetition excuses in a line of output, "" for nothing.
func inexcusable(line string) string {
	switch {
	case strings.Contains(line, defect.Prefix):
		return "a defect"
	case strings.Contains(line, "WARNING: DATA RACE"):
		return "a data race"
	case strings.HasPrefix(line, "panic: "):
		return "a panic"
	case strings.HasPrefix(line, "fatal error: "):
		return "a fatal error"
	}
	return ""
}

// alarm returns the line of output that gotestsum takes for the end of the process in a panic,
// or for a data race, "" if there is none. It runs nothing again then, also if the test that
// printed the line has passed.
func alarm(output string) string {
	for line := range strings.Lines(output) {
		if strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "WARNING: DATA RACE") {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

// An event is one line of what go test -json prints.
type event struct {
	Action      string
	Package     string
	Test        string
	Output      string
	ImportPath  string // of what was built, with build-output
	FailedBuild string // the ImportPath of what could not be built, with fail
}

// A judge gathers events.
type judge struct {
	tests  map[testID]*test
	order  []*test           // by their first event
	builds map[string]string // output of the compiler by ImportPath
}

// A testID names a test. The name is empty for what concerns a whole package.
type testID struct{ pkg, name string }

// A test is a test with its subtests, or what a package prints and how it ends.
type test struct {
	testID
	open      bool            // a run goes on
	output    strings.Builder // of that run
	found     string          // what no repetition excuses in that run, if it fails
	failure   string          // output of the first run that failed
	skipping  string          // the last line that the test has printed
	last      string          // how the last run ended: pass, fail or skip
	runs      int
	failures  int
	grave     string // what no repetition excuses
	graveText string // output of the run that had it
	alarm     string // a line of a run that passed, by which nothing would be run again
}

func newJudge() *judge {
	return &judge{tests: make(map[testID]*test), builds: make(map[string]string)}
}

// read takes the events of a file, in the order of time.
func (j *judge) read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if err := json.Unmarshal(line, &e); err != nil {
				return err
			}
			j.take(&e)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (j *judge) take(e *event) {
	if e.Package == "" {
		j.builds[e.ImportPath] += e.Output
		return
	}
	root, sub, _ := strings.Cut(e.Test, "/")
	t := j.tests[testID{e.Package, root}]
	if t == nil {
		t = &test{testID: testID{e.Package, root}}
		j.tests[t.testID] = t
		j.order = append(j.order, t)
	}
	switch e.Action {
	case "run":
		if sub == "" {
			if t.open {
				t.end("fail") // Its process has ended without a word.
			}
			t.open = true
		}
	case "output":
		t.output.WriteString(e.Output)
		if text := strings.TrimSpace(e.Output); !strings.HasPrefix(text, "---") && !strings.HasPrefix(text, "===") {
			t.skipping = text
		}
		if t.found == "" {
			t.found = inexcusable(e.Output)
		}
	case "skip":
		if sub != "" || root == "" {
			return
		}
		fallthrough
	case "pass", "fail":
		if sub != "" {
			return
		}
		if root == "" {
			j.endAll(e.Package)
		}
		t.output.WriteString(j.builds[e.FailedBuild])
		t.end(e.Action)
	}
}

// endAll ends the tests that go on when the process that ran them has ended. Nobody knows
// what the tests behind them would have found.
func (j *judge) endAll(pkg string) {
	for _, t := range j.order {
		if t.pkg == pkg && t.open {
			if t.found == "" {
				t.found = "the end of the process in the middle of a test"
			}
			t.end("fail")
		}
	}
}

// end ends a run of the test.
func (t *test) end(how string) {
	t.open = false
	t.runs++
	t.last = how
	text, found := t.output.String(), t.found
	t.output.Reset()
	t.found = ""
	if how != "fail" {
		if t.alarm == "" {
			t.alarm = alarm(text)
		}
		return
	}
	t.failures++
	if t.failure == "" {
		t.failure = text
	}
	if t.grave == "" && found != "" {
		t.grave, t.graveText = found, text
	}
}

// verdict judges all that was read.
func (j *judge) verdict() (v verdict) {
	v.Skipped = make(map[string]int)
	failed := make(map[string]bool) // packages of which a test has failed
	var grave, always, unended, whole, alarming []*test
	for _, t := range j.order {
		if t.alarm != "" {
			alarming = append(alarming, t)
		}
		if t.name == "" {
			continue
		}
		v.Tests++
		if t.failures > 0 {
			v.Again += t.runs - 1
			failed[t.pkg] = true
		}
		switch {
		case t.grave != "":
			grave = append(grave, t)
		case t.runs == 0:
			unended = append(unended, t)
		case t.failures > 0 && t.last != "pass":
			always = append(always, t)
		case t.failures > 0:
			v.Flaky = append(v.Flaky, t.String()+": "+firstLine(t.failure))
		case t.last == "skip":
			v.Skipped[reason(t.skipping)]++
		}
	}
	for _, t := range j.order {
		switch {
		case t.name != "" || t.failures == 0:
		case t.grave != "":
			grave = append(grave, t)
		case !failed[t.pkg]:
			// TestMain has failed, or nothing could be built.
			whole = append(whole, t)
		}
	}
	switch {
	case len(grave) > 0:
		t := grave[0]
		v.Failure = t.String() + ": " + t.grave + ", which no repetition excuses\n" + t.graveText
	case len(whole) > 0:
		v.Failure = whole[0].String() + " failed\n" + whole[0].failure
	case len(always) > 0:
		t := always[0]
		v.Failure = t.String() + " failed " + t.times() + "\n" + t.failure
	case len(unended) > 0:
		t := unended[0]
		v.Failure = t.String() + " has begun and not ended\n" + t.output.String()
	case len(alarming) > 0:
		t := alarming[0]
		v.Failure = t.String() + " passed and printed what looks like the end of the process, so that no test that fails is run again; " +
			"print it elsewhere or with something before it\n" + t.alarm
	}
	return v
}

// times says how often the test has failed.
func (t *test) times() string {
	if t.runs == 1 {
		return "in its only run; it was not run again"
	}
	return fmt.Sprintf("in %d of its %d runs", t.failures, t.runs)
}

func (t *test) String() string {
	pkg := strings.TrimPrefix(t.pkg, "github.com/rdmanet/")
	if t.name == "" {
		return "package " + pkg
	}
	return t.name + " of " + pkg
}

// firstLine returns the first line of a failure that says something.
func firstLine(output string) string {
	for line := range strings.Lines(output) {
		line = strings.TrimSpace(line)
		switch {
		case line == "", strings.HasPrefix(line, "==="), strings.HasPrefix(line, "---"):
		case strings.HasSuffix(line, ".go:"), strings.HasPrefix(line, "Error Trace:"):
		default:
			return line
		}
	}
	return "it printed nothing"
}

// reason returns why a test was skipped, without the place.
func reason(line string) string {
	if _, why, ok := strings.Cut(line, ".go:"); ok {
		if _, why, ok := strings.Cut(why, ": "); ok {
			return why
		}
	}
	return line
}
