package rdmanet

import (
	"bytes"
	"crypto/rand"
	"io"
	"testing"
)

// Two programs that are both in Write, with more to send than fits on the way,
// go on as soon as one of them reads; the credits that are left are not used
// up by grants alone.
func TestBothEndsWriting(t *testing.T) {
	for _, lb := range loopbacks {
		t.Run(lb.network, func(t *testing.T) {
			client, server := pipe(t, lb.network, lb.address, new(ListenConfig), new(Dialer))
			defer client.Close()
			defer server.Close()
			go io.Copy(struct{ io.Writer }{server}, struct{ io.Reader }{server})
			want := make([]byte, 1<<20)
			rand.Read(want)
			sent := make(chan error, 1)
			go func() {
				for rest := want; len(rest) > 0; {
					n, err := client.Write(rest[:min(1000, len(rest))])
					if rest = rest[n:]; err != nil {
						sent <- err
						return
					}
				}
				sent <- nil
			}()
			got := make([]byte, len(want))
			if _, err := io.ReadFull(client, got); err != nil {
				t.Fatal(err)
			}
			if err := <-sent; err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Fatal("the echo differs")
			}
		})
	}
}

// A Write that has sent everything says so, though the connection is closed
// before it returns.
func TestWriteBeforeClose(t *testing.T) {
	for range 200 {
		client, server := pipe(t, "rdma", "127.0.0.1:0", new(ListenConfig), new(Dialer))
		wrote := make(chan error, 1)
		go func() {
			n, err := client.Write([]byte("last words"))
			if n == 10 {
				wrote <- err
			} else {
				wrote <- nil
			}
		}()
		p := make([]byte, 10)
		if _, err := io.ReadFull(server, p); err != nil {
			t.Fatal(err)
		}
		client.Close()
		server.Close()
		if err := <-wrote; err != nil {
			t.Fatalf("all was sent, and Write says %v", err)
		}
	}
}

// A stream one way takes few messages the other way, whether its reader keeps
// up or not: each wakes the writer.
func TestFewGrants(t *testing.T) {
	const size, messages = 4 << 10, 4000
	client, server := pipe(t, "rdma", "127.0.0.1:0", new(ListenConfig), new(Dialer))
	defer client.Close()
	defer server.Close()
	sent := make(chan error, 1)
	go func() {
		p := make([]byte, size)
		for range messages {
			if _, err := client.Write(p); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	if _, err := io.ReadFull(server, make([]byte, size*messages)); err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if n := server.Stats().EmptySent; n > messages/8 {
		t.Fatalf("%d messages came and %d went back only to grant", messages, n)
	}
}

// What one program writes reaches the other, although it does not read itself:
// the directions do not hold each other up.
func TestOneSidedReader(t *testing.T) {
	for _, cfg := range []Config{{}, {MaxReceiveCredits: minCredits}, {MaxReceiveSize: 1024, MaxSendSize: 1024}} {
		a, b := pipeOn(t, cfg)
		go a.Write(make([]byte, 64<<20))
		if !eventually(func() bool { return a.Stats().CreditStalls > 0 }) {
			t.Fatal("b takes everything")
		}
		const size = 16 << 20
		go b.Write(make([]byte, size))
		within(t, "read", func() {
			if _, err := io.ReadFull(a, make([]byte, size)); err != nil {
				t.Error(err)
			}
		})
		a.Close()
		b.Close()
	}
}
