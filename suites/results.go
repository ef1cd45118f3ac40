package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"strings"
)

// outcome is the result of a test.
type outcome string

const (
	passed     outcome = "passed"
	failed     outcome = "failed"
	skipped    outcome = "skipped"
	unfinished outcome = "unfinished" // unfinished: the binary ended, or was ended, while the test ran.
	absent     outcome = "not run"
)

// results has the results of all packages of a suite over one transport.
type results struct {
	tests       map[string]outcome // tests is keyed by package and name, for instance "http2.TestServer/sub".
	output      map[string][]string
	broken      []string // broken has the packages whose binary failed although none of its tests did.
	connections map[string]int
}

func newResults() *results {
	return &results{tests: make(map[string]outcome), output: make(map[string][]string), connections: make(map[string]int)}
}

// outputLines is how many lines are kept of what a test prints.
const outputLines = 60

// testName returns a test's name in the results and in the table. Tests of the module's
// root folder have no prefix.
func testName(pkg, test string) string {
	if pkg == "." {
		return test
	}
	return pkg + "." + test
}

// parse reads the output of a test binary with -test.v=test2json.
func (r *results) parse(pkg string, output io.Reader) error {
	cmd := exec.Command("go", "tool", "test2json")
	cmd.Stdin = output
	events, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	return errors.Join(r.events(pkg, events), cmd.Wait())
}

// events reads the output of test2json.
func (r *results) events(pkg string, events io.Reader) error {
	dec := json.NewDecoder(bufio.NewReader(events))
	for {
		var e struct{ Action, Test, Output string }
		err := dec.Decode(&e)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		name := testName(pkg, e.Test)
		if e.Action == "output" {
			lines := append(r.output[name], e.Output)
			r.output[name] = lines[max(0, len(lines)-outputLines):]
			continue
		}
		if e.Test == "" {
			continue
		}
		switch e.Action {
		case "run":
			r.tests[name] = unfinished
		case "pass":
			r.tests[name] = passed
		case "skip":
			r.tests[name] = skipped
		case "fail":
			// test2json has this also for tests that did not finish because the binary
			// ended.
			r.tests[name] = failed
		}
	}
}

// exit notes the exit of a package's binary.
func (r *results) exit(pkg string, err error) {
	if err == nil {
		return
	}
	for name, o := range r.tests {
		if strings.HasPrefix(name, testName(pkg, "")) && (o == failed || o == unfinished) {
			return
		}
	}
	r.broken = append(r.broken, fmt.Sprintf("%s: %v, though no test failed: %s", pkg, err, r.tail(pkg)))
}

// tail is the end of what a package's binary printed outside of tests.
func (r *results) tail(pkg string) string {
	return strings.Join(r.output[testName(pkg, "")], "")
}

// count reads the devices of connections from the file that shim has written.
func (r *results) count(name string) error {
	text, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for device := range strings.FieldsSeq(string(text)) {
		r.connections[device]++
	}
	return err
}

// number counts the tests with that outcome.
func (r *results) number(outcomes ...outcome) (n int) {
	for _, o := range r.tests {
		for _, want := range outcomes {
			if o == want {
				n++
			}
		}
	}
	return n
}

// of returns the outcome of a test.
func (r *results) of(name string) outcome {
	if o, ok := r.tests[name]; ok {
		return o
	}
	return absent
}
