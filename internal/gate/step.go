package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// eventsEnv names the folder to which a step writes the events of its tests.
const eventsEnv = "RDMANET_GATE"

// A status is how a step ended.
type status string

const (
	passed status = "ok"
	failed status = "FAILED"
	notRun status = "not run"
)

// A step is a target of make, and what came of it.
type step struct {
	name string
	dir  string // of its events, its output and its result

	// tree returns what stands for all that the result depends on. It is nil if no result is
	// kept.
	tree  func() (string, error)
	state string // what tree returned before the step ran

	result result
}

// A result is what is kept of a step.
type result struct {
	State   string // what tree returned then
	Status  status
	Seconds float64
	verdict
}

func (s *step) file(name string) string { return filepath.Join(s.dir, name) }

// load reads the result of an earlier run, and reports whether it still holds. It says so to
// w.
func (s *step) load(w io.Writer) (ok bool, err error) {
	if s.tree == nil {
		return false, nil
	}
	if s.state, err = s.tree(); err != nil {
		return false, err
	}
	b, err := os.ReadFile(s.file("result"))
	if err != nil || json.Unmarshal(b, &s.result) != nil || s.result.State != s.state || s.result.Status != passed {
		s.result = result{}
		return false, nil
	}
	fmt.Fprintf(w, "== %s: passed before, in %.0f s\n", s.name, s.result.Seconds)
	return true, nil
}

// run runs the step and judges it, unless that was done before. The output goes to w.
func (s *step) run(w io.Writer) error {
	if done, err := s.load(w); done || err != nil {
		return err
	}
	if err := os.RemoveAll(s.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(s.dir, 0o777); err != nil {
		return err
	}
	output, err := os.Create(s.file("output"))
	if err != nil {
		return err
	}
	defer output.Close()
	fmt.Fprintf(w, "== make %s\n", s.name)
	start := time.Now()
	cmd := exec.Command("make", "--no-print-directory", s.name)
	cmd.Env = append(os.Environ(), eventsEnv+"="+s.dir)
	both := io.MultiWriter(w, output)
	cmd.Stdout, cmd.Stderr = both, both
	failure := cmd.Run()
	s.result = result{Status: passed, Seconds: time.Since(start).Seconds()}
	if s.result.verdict, err = s.judge(failure != nil); err != nil {
		return err
	}
	if s.result.Failure != "" {
		s.result.Status = failed
	}
	fmt.Fprintf(w, "== make %s: %s, %.0f s\n", s.name, s.result.Status, s.result.Seconds)
	if s.tree == nil {
		return nil
	}
	// What was changed in the meantime was not what was run.
	if s.result.State, err = s.tree(); err != nil || s.result.State != s.state {
		return err
	}
	b, err := json.Marshal(s.result)
	if err != nil {
		return err
	}
	return os.WriteFile(s.file("result"), b, 0o666)
}

// judge reads the events of the step. broken says that its command failed.
func (s *step) judge(broken bool) (verdict, error) {
	names, err := filepath.Glob(s.file("*.json"))
	if err != nil {
		return verdict{}, err
	}
	var v verdict
	for _, name := range names {
		w, err := judgeFile(name)
		if err != nil {
			return verdict{}, err
		}
		v.add(w)
	}
	if v.Failure == "" && len(names) > 0 && v.Tests == 0 {
		v.Failure = "no test was run"
	}
	if !broken {
		return v, nil
	}
	output, err := os.ReadFile(s.file("output"))
	if err != nil {
		return verdict{}, err
	}
	if v.Failure == "" {
		v.Failure = string(bytes.TrimRight(output, "\n"))
		return v, nil
	}
	// gotestsum says so why it did not run again what has failed.
	for line := range strings.Lines(string(output)) {
		if strings.HasPrefix(line, "ERROR ") {
			v.Failure = strings.TrimRight(v.Failure, "\n") + "\n" + strings.TrimRight(line, "\n")
		}
	}
	return v, nil
}

// judgeFile reads the events of one file.
func judgeFile(name string) (verdict, error) {
	f, err := os.Open(name)
	if err != nil {
		return verdict{}, err
	}
	defer f.Close()
	j := newJudge()
	if err := j.read(f); err != nil {
		return verdict{Failure: fmt.Sprintf("%s has what is no event of a test: %v", name, err)}, nil
	}
	return j.verdict(), nil
}

// settings are the variables of make that change what a step does, besides those of rdmanet.
var settings = []string{"COUNT", "DEVICE", "FUZZTIME", "N", "SEED", "SUITE", "LEFT_OUT", "SHORT", "RACE"}

// treeState stands for all that a result depends on: the files of the working tree, except
// those that git ignores, the version of Go, and settings.
func treeState() (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, runtime.Version())
	for _, v := range slices.Sorted(slices.Values(os.Environ())) {
		name, _, _ := strings.Cut(v, "=")
		if strings.HasPrefix(name, "RDMANET_") || slices.Contains(settings, name) {
			fmt.Fprintln(h, v)
		}
	}
	for _, args := range [][]string{{"rev-parse", "HEAD"}, {"diff", "HEAD"}} {
		out, err := exec.Command("git", args...).Output()
		if err != nil {
			return "", fmt.Errorf("git %s: %w", args[0], err)
		}
		h.Write(out)
	}
	out, err := exec.Command("git", "ls-files", "-z", "--others", "--exclude-standard").Output()
	if err != nil {
		return "", fmt.Errorf("git ls-files: %w", err)
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		fmt.Fprintln(h, name)
		if info, err := os.Lstat(name); err != nil || !info.Mode().IsRegular() {
			continue
		}
		b, err := os.ReadFile(name)
		if err != nil {
			return "", err
		}
		h.Write(b)
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}
