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
	name  string
	dir   string // of its events, its output and its result
	state string // of the working tree

	result result
}

// A result is what is kept of a step.
type result struct {
	State   string // the state of the working tree with which it ran
	Status  status
	Seconds float64
	verdict
}

func (s *step) file(name string) string { return filepath.Join(s.dir, name) }

// load reads the result of an earlier run, and reports whether it still holds.
func (s *step) load() bool {
	b, err := os.ReadFile(s.file("result"))
	if err != nil || json.Unmarshal(b, &s.result) != nil {
		return false
	}
	if s.result.State != s.state || s.result.Status != passed {
		s.result = result{}
		return false
	}
	fmt.Printf("== %s: passed before, in %.0f s\n", s.name, s.result.Seconds)
	return true
}

// run runs the step and judges it.
func (s *step) run() error {
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
	fmt.Printf("== make %s\n", s.name)
	start := time.Now()
	cmd := exec.Command("make", "--no-print-directory", s.name)
	cmd.Env = append(os.Environ(), eventsEnv+"="+s.dir)
	both := io.MultiWriter(os.Stdout, output)
	cmd.Stdout, cmd.Stderr = both, both
	failure := cmd.Run()
	s.result = result{State: s.state, Status: passed, Seconds: time.Since(start).Seconds()}
	if s.result.verdict, err = s.judge(failure != nil); err != nil {
		return err
	}
	if s.result.Failure != "" {
		s.result.Status = failed
	}
	fmt.Printf("== make %s: %s, %.0f s\n", s.name, s.result.Status, s.result.Seconds)
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
	j := newJudge()
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return verdict{}, err
		}
		err = j.read(f)
		f.Close()
		if err != nil {
			return verdict{}, fmt.Errorf("%s: %w", name, err)
		}
	}
	v := j.verdict()
	if v.Failure == "" && broken {
		b, err := os.ReadFile(s.file("output"))
		if err != nil {
			return verdict{}, err
		}
		v.Failure = string(bytes.TrimRight(b, "\n"))
	}
	return v, nil
}

// treeState stands for the files of the working tree, except those that git ignores. It is
// empty if git cannot tell.
func treeState() (string, error) {
	h := sha256.New()
	for _, args := range [][]string{
		{"rev-parse", "HEAD"},
		{"diff", "HEAD"},
		{"ls-files", "--others", "--exclude-standard"},
	} {
		out, err := exec.Command("git", args...).Output()
		if err != nil {
			return "", fmt.Errorf("git %s: %w", args[0], err)
		}
		h.Write(out)
		if args[0] != "ls-files" {
			continue
		}
		for name := range bytes.Lines(out) {
			b, err := os.ReadFile(string(bytes.TrimSuffix(name, []byte("\n"))))
			if err != nil {
				return "", err
			}
			h.Write(b)
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}
