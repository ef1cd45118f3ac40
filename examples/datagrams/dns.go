package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/miekg/dns"
	"github.com/rdmanet/rdmanet/examples/internal/demo"
)

const (
	zone = "example."

	// tries is how often a query is sent: datagrams may be lost.
	tries = 5
)

// serveDNS hands the PacketConn to the DNS server.
func serveDNS(p net.PacketConn) error {
	srv := &dns.Server{PacketConn: p, Handler: dns.HandlerFunc(answer), NotifyStartedFunc: func() { demo.Ready(p.LocalAddr().String()) }}
	return srv.ActivateAndServe()
}

// answer knows for each name in the zone a text that follows from it.
func answer(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg).SetReply(q)
	name := q.Question[0].Name
	if q.Question[0].Qtype != dns.TypeTXT || !strings.HasSuffix(name, "."+zone) {
		m.Rcode = dns.RcodeNameError
	} else {
		m.Answer = []dns.RR{&dns.TXT{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{textOf(name)}}}
	}
	w.WriteMsg(m)
}

func textOf(name string) string {
	label, _, _ := strings.Cut(name, ".")
	return "you asked for " + strings.ToUpper(label)
}

// queryDNS hands the dialled connection to the DNS client.
func queryDNS(ctx context.Context, dial demo.DialFunc, addr string, n int) (string, error) {
	c, err := dial(ctx, addr)
	if err != nil {
		return "", err
	}
	conn := &dns.Conn{Conn: c}
	defer conn.Close()
	client := &dns.Client{Timeout: time.Second}
	start := time.Now()
	for i := range n {
		name := fmt.Sprintf("host-%d.%s", i, zone)
		q := new(dns.Msg).SetQuestion(name, dns.TypeTXT)
		var got *dns.Msg
		for try := 1; ; try++ {
			got, _, err = client.ExchangeWithConnContext(ctx, q, conn)
			if err == nil {
				break
			}
			var ne net.Error
			if try == tries || !errors.As(err, &ne) || !ne.Timeout() {
				return "", err
			}
		}
		if len(got.Answer) != 1 || got.Answer[0].(*dns.TXT).Txt[0] != textOf(name) {
			return "", fmt.Errorf("wrong answer for %s: %v", name, got)
		}
	}
	got, _, err := client.ExchangeWithConnContext(ctx, new(dns.Msg).SetQuestion("elsewhere.test.", dns.TypeTXT), conn)
	if err != nil {
		return "", err
	}
	if got.Rcode != dns.RcodeNameError {
		return "", fmt.Errorf("a name that is not there was answered with %v", got)
	}
	took := time.Since(start)
	fmt.Printf("%d queries in %v, %.0f a second\n", n, took.Round(time.Millisecond), float64(n)/took.Seconds())
	return "every answer as it should be", nil
}
