package rdmanet

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/defect"
)

var exits = flag.Int("exits", 24, "how many `processes` of TestProcessExits end")

// exitsEnv makes the test binary a process that writes to an address and ends.
const exitsEnv = "RDMANET_EXIT"

// exitPlan is what a process writes to one connection, after the plan itself. It ends as soon
// as its Writes to all connections have returned.
type exitPlan struct {
	Seed  uint64
	Size  uint32
	Piece uint32 // of each Write
	How   exitHow
}

type exitHow uint8

const (
	exitsOpen exitHow = iota
	exitsCloseWrite
	exitsUnread   // the other end reads after the process has ended
	exitsHalf     // so it does, and it has closed its writing side before
	exitsDeadline // Writes are cut by deadlines again and again
	exitKinds
)

const (
	exitPlanLen = 17
	exitConns   = 3       // of one process
	exitMost    = 4 << 20 // bytes of one connection
)

func newExitPlan(rnd *rand.Rand) exitPlan {
	p := exitPlan{Seed: rnd.Uint64(), How: exitHow(rnd.IntN(int(exitKinds)))}
	switch rnd.IntN(4) {
	case 0:
		p.Size = uint32(rnd.IntN(2000))
	case 1:
		p.Size = uint32(rnd.IntN(300 << 10))
	default:
		p.Size = uint32(rnd.IntN(exitMost + 1))
	}
	p.Piece = max(p.Size, 1)
	if rnd.IntN(2) == 0 {
		p.Piece = max(p.Size/uint32(1+rnd.IntN(50)), 1)
	}
	if p.How == exitsUnread || p.How == exitsHalf {
		p.Size = min(p.Size, 1<<20)
	}
	return p
}

// beExiting is what the second process does.
func beExiting(address string) {
	rnd := rand.New(rand.NewPCG(rand.Uint64(), 1))
	var wg sync.WaitGroup
	var conns [exitConns]net.Conn
	for i := range conns {
		p := newExitPlan(rnd)
		wg.Go(func() {
			var err error
			if conns[i], err = Dial("rdma", address); err == nil {
				err = p.write(conns[i])
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, "exiting:", err)
				os.Exit(1)
			}
		})
	}
	wg.Wait()
	runtime.KeepAlive(conns) // a connection that is dropped is closed
	os.Exit(0)
}

func (p *exitPlan) write(c net.Conn) error {
	b, err := binary.Append(nil, binary.BigEndian, p)
	if err != nil {
		return err
	}
	if _, err := c.Write(b); err != nil {
		return err
	}
	patience := time.Duration(p.Seed%500) * time.Microsecond
	for data := pattern(p.Seed, int(p.Size)); len(data) > 0; patience += 10 * time.Microsecond {
		if p.How == exitsDeadline {
			c.SetWriteDeadline(time.Now().Add(patience))
		}
		n, err := c.Write(data[:min(len(data), int(p.Piece))])
		if data = data[n:]; err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
	if p.How == exitsDeadline {
		// What a Write that was cut has left goes before this one, which is cut by nothing.
		c.SetWriteDeadline(time.Time{})
		if _, err := c.Write([]byte{1}); err != nil {
			return err
		}
	}
	if p.How == exitsCloseWrite {
		return c.(*Conn).CloseWrite()
	}
	return nil
}

// check reads what a process has written. ended is closed when that process has ended.
func (p *exitPlan) check(c *Conn, ended chan struct{}) error {
	if (p.How == exitsUnread || p.How == exitsHalf) && c.Info().Extensions.HeldSends {
		<-ended
	}
	if p.How == exitsHalf {
		if err := c.CloseWrite(); err != nil {
			return err
		}
	}
	got, err := io.ReadAll(c)
	want := pattern(p.Seed, int(p.Size))
	if p.How == exitsDeadline {
		want = append(want, 1)
	}
	if err == nil || c.Info().Extensions.HeldSends {
		return errors.Join(err, defect.Differ(want, got))
	}
	// A device may have lost what it had not sent, and says so.
	if len(got) > len(want) {
		return fmt.Errorf("%d bytes, and %d were written", len(got), len(want))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		return err
	}
	return defect.Differ(want[:len(got)], got)
}

// When a process ends without Close, the peer reads all that Write has taken, and then the end
// of the stream, as with TCP. Where devices do not hold Sends the last bytes may be missing, but
// then the end is an error.
func TestProcessExits(t *testing.T) {
	switch address := os.Getenv(exitsEnv); address {
	case "":
	case exitAnswer:
		if err := beAnswering(); err != nil {
			fmt.Fprintln(os.Stderr, "answering:", err)
			os.Exit(1)
		}
		os.Exit(0)
	default:
		beExiting(address)
	}
	checkLeaks(t)
	ln, err := Listen("rdma4", local4)
	require.NoError(t, err)
	defer ln.Close()
	exe, err := os.Executable()
	require.NoError(t, err)
	for range *exits {
		cmd := exec.Command(exe, "-test.run=^TestProcessExits$")
		cmd.Env = append(os.Environ(), exitsEnv+"="+ln.Addr().String())
		cmd.Stderr = os.Stderr
		require.NoError(t, cmd.Start())
		ended, results := make(chan struct{}), make(chan error, exitConns)
		for range exitConns {
			nc, err := ln.Accept()
			require.NoError(t, err)
			go func() {
				var p exitPlan
				b := make([]byte, exitPlanLen)
				_, err := io.ReadFull(nc, b)
				if err == nil {
					_, err = binary.Decode(b, binary.BigEndian, &p)
				}
				if err == nil {
					err = p.check(nc.(*Conn), ended)
				}
				if err != nil {
					err = fmt.Errorf("%+v: %w", p, err)
				}
				results <- errors.Join(err, nc.Close())
			}()
		}
		within(t, "the process", func() { require.NoError(t, cmd.Wait()) })
		close(ended)
		for range exitConns {
			within(t, "the connection", func() { require.NoError(t, <-results) })
		}
	}
}

// exitAnswer says that a process answers, in place of the address to which it dials.
const exitAnswer = "answers"

// beAnswering is a process that listens, answers a request and ends.
func beAnswering() error {
	ln, err := listenAndPrint()
	if err != nil {
		return err
	}
	c, err := ln.Accept()
	if err != nil {
		return err
	}
	if _, err := io.ReadFull(c, make([]byte, exitRequest)); err != nil {
		return err
	}
	_, err = c.Write(pattern(1, exitAnswerSize))
	runtime.KeepAlive(c)
	runtime.KeepAlive(ln)
	return err
}

const (
	exitRequest    = 64 << 10
	exitAnswerSize = 1 << 20
)

// A client reads the whole answer of a process that has ended, and then the end of the stream, as
// with TCP. That holds also while the connection moves to shared memory.
func TestProcessAnswersAndExits(t *testing.T) {
	checkLeaks(t)
	exe, err := os.Executable()
	require.NoError(t, err)
	for _, sameHost := range []string{cmp.Or(os.Getenv(iwarp.SameHostEnv), "off"), "on"} {
		t.Setenv(iwarp.SameHostEnv, sameHost) // for the process
		dialer := &Dialer{Config: Config{SameHost: sameHost}}
		for range *exits / 2 {
			cmd := exec.Command(exe, "-test.run=^TestProcessExits$")
			cmd.Env = append(os.Environ(), exitsEnv+"="+exitAnswer)
			cmd.Stderr = os.Stderr
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			address, err := bufio.NewReader(out).ReadString('\n')
			require.NoError(t, err)
			nc, err := dialer.Dial("rdma4", strings.TrimSpace(address))
			require.NoError(t, err)
			c := nc.(*Conn)
			_, err = c.Write(make([]byte, exitRequest))
			require.NoError(t, err)
			holds := c.Info().Extensions.HeldSends
			if holds {
				within(t, "the process", func() { require.NoError(t, cmd.Wait()) })
			}
			var got []byte
			within(t, "the answer", func() { got, err = io.ReadAll(c) })
			want := pattern(1, exitAnswerSize)
			if !holds {
				within(t, "the process", func() { require.NoError(t, cmd.Wait()) })
				if err != nil { // A device may have lost what it had not sent, and says so.
					require.ErrorIs(t, err, syscall.ECONNRESET)
					want = want[:min(len(got), len(want))]
				}
			} else {
				require.NoError(t, err, "after %d bytes", len(got))
			}
			defect.Bytes(t, want, got)
			require.NoError(t, c.Close())
		}
	}
}

// A process that is killed while it leaves something unread is a reset, as with TCP. Where devices
// do not hold Sends it may be an orderly end.
func TestProcessReadsAndIsKilled(t *testing.T) {
	checkLeaks(t)
	for _, sameHost := range []string{cmp.Or(os.Getenv(iwarp.SameHostEnv), "off"), "on"} {
		t.Setenv(iwarp.SameHostEnv, sameHost) // for the process
		dialer := &Dialer{Config: Config{SameHost: sameHost}}
		v := startVictim(t, "sinks ")
		var conns [victimConns]*Conn
		for i := range conns {
			address, err := v.out.ReadString('\n')
			require.NoError(t, err)
			c, err := dialer.Dial("rdma4", strings.TrimSpace(address))
			require.NoError(t, err)
			conns[i] = c.(*Conn)
		}
		for _, c := range conns {
			// More than there is room for.
			require.NoError(t, c.SetWriteDeadline(time.Now().Add(300*time.Millisecond)))
			_, err := c.Write(make([]byte, 64<<20))
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		}
		v.kill()
		for _, c := range conns {
			var err error
			within(t, "the end", func() { _, err = c.Read(make([]byte, 1)) })
			if c.Info().Extensions.HeldSends {
				require.ErrorIs(t, err, syscall.ECONNRESET)
			} else {
				requirePeerGone(t, err)
			}
			require.NoError(t, c.Close())
		}
	}
}

// The stream of a process that is killed while it writes ends where what its kernel has taken
// does, also in the middle of a message.
func TestKilledWriter(t *testing.T) {
	checkLeaks(t)
	ln, err := Listen("rdma4", local4)
	require.NoError(t, err)
	defer ln.Close()
	for range 6 {
		v := startVictim(t, "writes "+ln.Addr().String())
		var conns [victimConns]*Conn
		for i := range conns {
			c, err := ln.Accept()
			require.NoError(t, err)
			conns[i] = c.(*Conn)
		}
		for _, c := range conns {
			_, err := io.ReadFull(c, make([]byte, victimMessage/3))
			require.NoError(t, err)
		}
		v.kill()
		stream, messages := conns[0], conns[1]
		_, err := io.Copy(io.Discard, stream)
		if stream.Info().Extensions.HeldSends {
			require.NoError(t, err)
		} else {
			requirePeerGone(t, err)
		}
		n, b := 0, make([]byte, victimMessage)
		for err = nil; err == nil; n, err = messages.ReadMsg(b) {
		}
		if messages.Info().Extensions.HeldSends {
			require.True(t, n == 0 && err == io.EOF || n > 0 && errors.Is(err, io.ErrUnexpectedEOF), "%d, %v", n, err)
		} else {
			requirePeerGone(t, err)
		}
		for _, c := range conns {
			require.NoError(t, c.Close())
		}
	}
}

const victimMessage = 1 << 20

// writeMessages is the victim that writes one message after the other.
func writeMessages(c net.Conn) error {
	for b := make([]byte, victimMessage); ; {
		if _, err := c.(*Conn).WriteMsg(b); err != nil {
			return err
		}
	}
}
