package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/rdmanet/rdmanet/suites/shim"
)

// guestFactor is how many times as long a suite may take in a guest.
const guestFactor = 12

// runSuite runs a suite over TCP and over rdmanet, and compares.
func runSuite(s suite, device, checkout, temp string) (report, error) {
	r := report{suite: s, alone: make(map[string]bool)}
	var ours []execution
	for _, over := range []transport{overTCP, overRDMANet} {
		t, err := prepare(s, over, device != "iwarp", checkout, temp)
		if err != nil {
			return r, err
		}
		res := newResults()
		for _, pkg := range s.packages {
			bin, err := t.testBinary(pkg)
			if err != nil {
				return r, err
			}
			e := execution{suite: s, tree: t, pkg: pkg, bin: bin, over: over, device: device, checkout: checkout}
			if err := e.run(res); err != nil {
				return r, fmt.Errorf("%s over %s: %w", pkg, over, err)
			}
			if over == overRDMANet {
				ours = append(ours, e)
			}
		}
		if over == overTCP {
			r.tcp = res
		} else {
			r.rdmanet = res
		}
	}
	for _, name := range r.doubtful(device != "iwarp") {
		var err error
		if r.alone[name], err = passesAlone(ours, name); err != nil {
			return r, fmt.Errorf("%s alone: %w", name, err)
		}
	}
	r.judge(device)
	return r, nil
}

// aloneTimes is how often a flaky test is run alone, until it passes.
const aloneTimes = 3

// passesAlone runs a test again, without the others. It reports whether it passed once.
func passesAlone(executions []execution, name string) (bool, error) {
	for range aloneTimes {
		for _, e := range executions {
			test, ok := strings.CutPrefix(name, testName(e.pkg, ""))
			if !ok {
				continue
			}
			e.suite.run = exactly(test) // A package without such a test accepts that too.
			res := newResults()
			if err := e.run(res); err != nil {
				return false, err
			}
			if res.of(name) == passed {
				return true, nil
			}
		}
	}
	return false, nil
}

// exactly returns the value of -test.run for one test.
func exactly(test string) string {
	parts := strings.Split(test, "/")
	for i, part := range parts {
		parts[i] = "^" + regexp.QuoteMeta(part) + "$"
	}
	return strings.Join(parts, "/")
}

// execution is one run of the tests of one package.
type execution struct {
	suite    suite
	tree     *tree
	pkg, bin string
	over     transport
	device   string
	checkout string
}

func (e *execution) inGuest() bool { return e.device != "iwarp" }

// run runs the tests and adds their results to res.
func (e *execution) run(res *results) error {
	counts := filepath.Join(e.tree.dir, strings.ReplaceAll(e.pkg, "/", "-")+".counts")
	if err := os.MkdirAll(counts, 0o777); err != nil {
		return err
	}
	cmd := e.command(counts)
	// go test joins the two outputs as well.
	output, w := io.Pipe()
	cmd.Stdout, cmd.Stderr = w, w
	cmd.WaitDelay = 10 * time.Second // The tests may have left programs running.
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		err := cmd.Wait()
		w.Close()
		ended <- err
	}()
	parseErr := res.parse(e.pkg, output)
	io.Copy(io.Discard, output)
	err := <-ended
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return err
	}
	if e.inGuest() && cmd.ProcessState.ExitCode() == 125 {
		return fmt.Errorf("vm/run failed: %s", res.tail(e.pkg))
	}
	res.exit(e.pkg, err)
	return errors.Join(parseErr, res.count(filepath.Join(counts, countFile)))
}

// countFile is the file in which shim records connections.
const countFile = "connections"

// command returns the command that runs the test binary, on the host or in vm/run.
func (e *execution) command(counts string) *exec.Cmd {
	timeout := e.suite.timeout
	if e.inGuest() {
		timeout *= guestFactor
	}
	args := []string{e.bin, "-test.v=test2json", "-test.timeout=" + timeout.String()}
	if e.suite.run != "" {
		args = append(args, "-test.run="+e.suite.run)
	}
	if e.tree.server != "" {
		args = append(args, "-redis-server="+e.tree.server)
	}
	var env []string
	if !e.inGuest() {
		env = slices.Clone(e.suite.hostEnv)
	}
	if e.over == overRDMANet {
		device, dir := "iwarp", counts
		if e.inGuest() {
			device, dir = "rdma", "/run/vm/results"
		}
		env = append(env, "RDMANET_DEVICE="+device, shim.CountEnv+"="+filepath.Join(dir, countFile),
			shim.OutsideEnv+"="+strings.Join(e.suite.outside, ","))
	}
	if e.inGuest() {
		guest := []string{
			filepath.Join(e.checkout, "vm", "run"), "-device", e.device, "-results", counts,
			"-timeout", fmt.Sprintf("%ds", int((timeout + 5*time.Minute).Seconds())),
		}
		for _, variable := range env {
			guest = append(guest, "-env", variable)
		}
		args = append(append(guest, "--"), args...)
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = filepath.Join(e.tree.module, e.pkg)
	cmd.Env = append(withoutVM(os.Environ()), "PWD="+cmd.Dir)
	if !e.inGuest() {
		cmd.Env = append(cmd.Env, env...)
	}
	return cmd
}

// withoutVM removes the variables that would make shim look for a guest's device, or
// rdmanet for another device.
func withoutVM(env []string) []string {
	return slices.DeleteFunc(env, func(variable string) bool {
		return strings.HasPrefix(variable, "RDMANET_VM_ADDR") || strings.HasPrefix(variable, "RDMANET_DEVICE=")
	})
}
