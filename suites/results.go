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

// outcome is how a test ended.
type outcome string

const (
	passed     outcome = "passed"
	failed     outcome = "failed"
	skipped    outcome = "skipped"
	unfinished outcome = "unfinished" // the binary ended, or was ended, while the test ran
	absent     outcome = "not run"
)

// results are those of all packages of a suite over one transport.
type results struct {
	tests       map[string]outcome // by package and name, as in "http2.TestServer/sub"
	output      map[string][]string
	broken      []string // packages whose binary failed though none of its tests did
	connections map[string]int
}

func newResults() *results {
	return &results{tests: make(map[string]outcome), output: make(map[string][]string), connections: make(map[string]int)}
}

// outputLines is how many lines are kept of what a test prints.
const outputLines = 60

// testName is a test's name in the results and in the table. What is in the module's
// folder has no prefix.
func testName(pkg, test string) string {
	if pkg == "." {
		return test
	}
	return pkg + "." + test
}

// parse reads what a test binary prints with -test.v=test2json.
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

// events reads what test2json makes of it.
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
			// test2json has this for tests that the binary's end cut short as well.
			r.tests[name] = failed
		}
	}
}

// exit notes how the binary of a package ended.
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

// tail is the end of what the binary of a package printed outside of tests.
func (r *results) tail(pkg string) string {
	return strings.Join(r.output[testName(pkg, "")], "")
}

// count reads the devices of connections that shim wrote down.
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

// number counts the tests that ended so.
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

// of returns how a test ended.
func (r *results) of(name string) outcome {
	if o, ok := r.tests[name]; ok {
		return o
	}
	return absent
}
