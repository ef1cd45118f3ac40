package demo

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// stopTime is how long the server process has to end after it was asked to.
const stopTime = 10 * time.Second

// both starts this program again as the server, and runs the client in this process. So the
// data moves between two processes. It fails if either of them fails.
func (p Program) both(ctx context.Context, o options) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	self, err := os.Executable()
	if err != nil {
		return err
	}
	server := exec.CommandContext(ctx, self, serverArgs(o)...)
	server.Stderr = os.Stderr
	stdin, err := server.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := server.StdoutPipe()
	if err != nil {
		return err
	}
	server.Cancel = stdin.Close // The server cleans up. After WaitDelay it is killed.
	server.WaitDelay = stopTime
	if err := server.Start(); err != nil {
		return err
	}

	found, err := p.useServer(ctx, o, bufio.NewReader(stdout))
	stdin.Close()
	time.AfterFunc(stopTime, cancel)
	if waitErr := server.Wait(); waitErr != nil {
		err = errors.Join(err, fmt.Errorf("server process: %w", waitErr))
	}
	if err != nil {
		return err
	}
	fmt.Println("ok:", found)
	return nil
}

// useServer reads the address from the server's output, and runs the client.
func (p Program) useServer(ctx context.Context, o options, stdout *bufio.Reader) (string, error) {
	line, err := stdout.ReadString('\n')
	addr, isReady := strings.CutPrefix(strings.TrimSpace(line), readyPrefix)
	if line == "" {
		return "", errors.New("the server did not start, for the reason above")
	}
	if err != nil || !isReady {
		return "", fmt.Errorf("the server did not start: it said %q", line)
	}
	fmt.Printf("server: process of its own, %s%s\n", readyPrefix, addr)
	go io.Copy(os.Stdout, stdout)
	return p.use(ctx, o, addr)
}

// serverArgs returns the flags of this process, with those that make it a server.
func serverArgs(o options) []string {
	var args []string
	flag.Visit(func(f *flag.Flag) {
		args = append(args, "-"+f.Name+"="+f.Value.String())
	})
	return append(args, "-serve="+o.loopback(), "-until-eof")
}
