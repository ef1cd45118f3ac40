package rdmanet

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

var bothModes = []bool{false, true}

// eachMode runs f over connections that move large transfers by RDMA Read and by
// RDMA Write.
func eachMode(t *testing.T, cfg Config, f func(t *testing.T, a, b *Conn)) {
	for _, noRead := range bothModes {
		t.Run(map[bool]string{false: "read", true: "write"}[noRead], func(t *testing.T) {
			checkLeaks(t)
			cfg.NoRDMARead = noRead
			a, b := pipeOn(t, cfg)
			f(t, a, b)
			a.Close()
			b.Close()
		})
	}
}

// From a Buffer into a Buffer nothing is copied, on either side.
func TestNothingCopied(t *testing.T) {
	var cfg Config
	if !onRDMA {
		cfg.TransferSize = inlineTransfer
	}
	eachMode(t, cfg, func(t *testing.T, a, b *Conn) {
		const size = 64 << 20
		src, dst := alloc(t, size).Bytes(), alloc(t, size).Bytes()
		copy(src, pattern(1, size))
		wrote := make(chan error, 1)
		go func() {
			_, err := a.Write(src)
			wrote <- err
		}()
		_, err := io.ReadFull(b, dst)
		require.NoError(t, err)
		require.NoError(t, <-wrote)
		defect.Bytes(t, src, dst)
		for _, st := range []Stats{a.Stats(), b.Stats()} {
			require.Zero(t, st.BytesCopied)
			require.Zero(t, st.TransfersRefused)
		}
		require.EqualValues(t, size, a.Stats().TransferBytesSent)
		require.EqualValues(t, size, b.Stats().TransferBytesReceived)
	})
}

// From and to ordinary memory at most one copy a side is made, by whatever reads.
func TestOneCopyAtMost(t *testing.T) {
	for _, room := range []int{1 << 10, 32 << 10, 1 << 20} {
		eachMode(t, Config{}, func(t *testing.T, a, b *Conn) {
			size := heavy(32 << 20)
			src := pattern(2, size)
			wrote := make(chan error, 1)
			go func() {
				for p := src; len(p) > 0; p = p[1<<20:] {
					if _, err := a.Write(p[:1<<20]); err != nil {
						wrote <- err
						return
					}
				}
				wrote <- a.CloseWrite()
			}()
			got := make([]byte, 0, size)
			p := make([]byte, room)
			for {
				n, err := b.Read(p)
				got = append(got, p[:n]...)
				if err == io.EOF {
					break
				}
				require.NoError(t, err)
			}
			require.NoError(t, <-wrote)
			defect.Bytes(t, src, got)
			require.LessOrEqual(t, a.Stats().BytesCopied, uint64(size))
			// A reader that is late, as on a busy machine, has bytes copied out of their receives.
			require.Less(t, b.Stats().BytesCopied, uint64(size)*3/2)
		})
	}
}

// A file goes from disk to disk through ReadFrom and WriteTo with no copy between
// the file and the device where memory is pinned, and with none but the
// receive buffers' elsewhere.
func TestFileByTransfers(t *testing.T) {
	eachMode(t, Config{}, func(t *testing.T, a, b *Conn) {
		size := heavy(16<<20) + 12345
		name := filepath.Join(t.TempDir(), "file")
		require.NoError(t, os.WriteFile(name, pattern(3, size), 0o600))
		f, err := os.Open(name)
		require.NoError(t, err)
		defer f.Close()
		sent := make(chan error, 1)
		go func() {
			n, err := a.ReadFrom(f)
			if err == nil && n != int64(size) {
				err = fmt.Errorf("%d of %d bytes", n, size)
			}
			if err == nil {
				err = a.CloseWrite()
			}
			sent <- err
		}()
		out, err := os.Create(name + ".copy")
		require.NoError(t, err)
		defer out.Close()
		n, err := b.WriteTo(out)
		require.NoError(t, err)
		require.NoError(t, <-sent)
		require.EqualValues(t, size, n)
		got, err := os.ReadFile(out.Name())
		require.NoError(t, err)
		defect.Bytes(t, pattern(3, size), got)
		if testDevice(t).Attr().MaxInline < pinnedSegment {
			require.NotZero(t, a.Stats().TransferBytesSent)
		}
		const end = 256 << 10 // what is too small for a transfer
		require.LessOrEqual(t, a.Stats().BytesCopied, uint64(end))
	})
}

// Two programs that write before they read do not wait for each other, as little
// as with TCP.
func TestWriteBeforeRead(t *testing.T) {
	eachMode(t, Config{TransferSize: 64 << 10}, func(t *testing.T, a, b *Conn) {
		const size = 512 << 10
		conns := []*Conn{a, b}
		var wg sync.WaitGroup
		errs := make([]error, 2)
		within(t, "exchange", func() {
			for i, c := range conns {
				wg.Add(1)
				go func() {
					defer wg.Done()
					src := alloc(t, size).Bytes()
					copy(src, pattern(uint64(i), size))
					if _, errs[i] = c.Write(src); errs[i] != nil {
						return
					}
					errs[i] = defect.ReadFull(c, pattern(uint64(1-i), size))
				}()
			}
			wg.Wait()
		})
		require.NoError(t, errs[0])
		require.NoError(t, errs[1])
	})
}

// A message of any size keeps its boundaries.
func TestLargeMessages(t *testing.T) {
	eachMode(t, Config{}, func(t *testing.T, a, b *Conn) {
		b.SetDeadline(time.Now().Add(patience))
		sizes := []int{1, 100 << 10, 3<<20 + 1, 10, heavy(32 << 20), 1 << 20}
		wrote := make(chan error, 1)
		go func() {
			for i, n := range sizes {
				if err := writeMsg(a, pattern(uint64(i), n)); err != nil {
					wrote <- err
					return
				}
			}
			wrote <- nil
		}()
		p := make([]byte, 32<<20)
		for i, n := range sizes {
			if n > 1 {
				k, err := b.ReadMsg(p[:n-1])
				require.ErrorIs(t, err, io.ErrShortBuffer)
				require.Equal(t, n, k)
			}
			k, err := b.ReadMsg(p)
			require.NoError(t, err)
			require.Equal(t, n, k)
			require.True(t, string(pattern(uint64(i), n)) == string(p[:n]), "message %d", i)
		}
		require.NoError(t, <-wrote)
	})
}

// Many connections that move much stay within the bound for scratch memory, and
// give it back.
func TestTransferMemory(t *testing.T) {
	checkLeaks(t)
	const bound = 4 << 20
	conns := 250
	if onRDMA {
		conns = 64
	}
	dev := testDevice(t)
	cfg := Config{TransferSize: 64 << 10, TransferMemory: bound}
	ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", local4)
	require.NoError(t, err)
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				io.Copy(c, c)
				c.Close()
			}()
		}
	}()
	most := 0
	watch := func() {
		most = max(most, regmem.ChunksOf(dev)*regmem.ChunkSize)
	}
	const atOnce = 50
	var wg sync.WaitGroup
	errs := make(chan error, conns)
	gate := make(chan struct{}, atOnce)
	var mu sync.Mutex
	var all []*Conn
	for range conns {
		gate <- struct{}{}
		wg.Add(1)
		go func() {
			defer func() { <-gate; wg.Done() }()
			c, err := (&Dialer{Config: cfg}).Dial("rdma4", ln.Addr().String())
			if err != nil {
				errs <- err
				return
			}
			mu.Lock()
			all = append(all, c.(*Conn))
			mu.Unlock()
			src := pattern(4, 1<<20)
			done := make(chan error, 1)
			go func() {
				_, err := c.Write(src)
				done <- err
			}()
			if err := defect.ReadFull(c, src); err != nil {
				errs <- err
			}
			if err := <-done; err != nil {
				errs <- err
			}
			mu.Lock()
			watch()
			mu.Unlock()
		}()
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	require.LessOrEqual(t, most, bound)
	// Idle connections keep none of it. The timer would call shrinkIdle in some seconds; the test is
	// about the memory of the device that it runs on, where no virtual time passes.
	for _, c := range all {
		c.mu.Lock()
		c.shrinkIdle()
		c.unlock()
	}
	require.True(t, eventually(func() bool { return regmem.ChunksOf(dev) == 0 }))
	for _, c := range all {
		require.NoError(t, c.Close())
	}
}
