//go:build unix

package main

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/capture"
)

// TestMain is the program itself where a test has started it as such.
func TestMain(m *testing.M) {
	if os.Getenv("RDMADUMP_RUN") != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// A capture that is still being made is shown as far as it has come, and an
// interrupt, which ends the program that makes it too, loses nothing of it.
func TestLive(t *testing.T) {
	b := rewrite(t, captureFile("siw-rping.pcap"), "pcap")
	want, _, _ := dump(t, options{file: captureFile("siw-rping.pcap")}, nil)
	cmd := exec.Command(os.Args[0], "-")
	cmd.Env = append(os.Environ(), "RDMADUMP_RUN=1")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(30*time.Second, func() { cmd.Process.Kill() })
	defer late.Stop()

	if _, err := stdin.Write(b[:len(b)/2]); err != nil {
		t.Fatal(err)
	}
	out := bufio.NewReader(stdout)
	first, err := out.ReadString('\n')
	if err != nil || !strings.Contains(first, "StartRequest") {
		t.Errorf("before the capture ends: %q, %v", first, err)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if _, err := stdin.Write(b[len(b)/2:]); err != nil {
		t.Errorf("after the interrupt: %v", err)
	}
	stdin.Close()
	rest, err := io.ReadAll(out)
	if got := first + string(rest); err != nil || got != want {
		t.Errorf("%v, %d lines, want %d", err, lines(got), lines(want))
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// Of a file no more is read, and there is what came before.
func TestInterrupted(t *testing.T) {
	src, err := open(captureFile("siw-rping.pcap"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer src.close()
	n := 0
	err = src.each(func(*capture.Packet) {
		if n++; n == 5 {
			src.stop.Store(true)
		}
	})
	if n != 5 || err == nil || !strings.Contains(err.Error(), "interrupted before packet 6") {
		t.Errorf("%d packets, %v", n, err)
	}
}
